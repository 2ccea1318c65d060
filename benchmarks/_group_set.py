"""The process groups that Megatron-LM makes, two back ends without transport, and who makes them.

`none` is torch's FakeProcessGroup under another name (under the name fake torch makes no store).
`ids` is the same and meets through the store as ProcessGroupNCCL does, when the group is made: the
first rank sets an id of 128 bytes, the others get it; in groups of more than 128 ranks one rank of
each 128 sets one, and all get all (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from commkit import api, layout

#: commkit's words for the families, in Megatron's order of making.
WORDS = ("dp", "mp", "tp", "pp", "embd", "pos_embd", "tp-dp")

_RANKS_A_ROOT = 128
_ID = b"x" * 128


def shape(ranks: int) -> tuple[int, int, int]:
    """Sizes of tensor, data and pipeline parallelism for a world of so many ranks."""
    tp = 2 if ranks < 16 else 4 if ranks < 64 else 8
    pp = 2 if ranks < 32 else 4 if ranks < 256 else 8
    return tp, ranks // (tp * pp), pp


def text(ranks: int) -> str:
    tp, dp, pp = shape(ranks)
    return f"tp={tp},dp={dp},pp={pp}"


def families(ranks: int) -> dict[str, list[list[int]]]:
    """As a framework without commkit works them out: tp neighbours, then dp, then pp."""
    tp, dp, pp = shape(ranks)

    def rank(t: int, d: int, p: int) -> int:
        return t + tp * (d + dp * p)

    tensor, data, pipeline = range(tp), range(dp), range(pp)
    columns = [(d, t) for d in data for t in tensor]
    return {
        "dp": [[rank(t, d, p) for d in data] for p in pipeline for t in tensor],
        "mp": [[rank(t, d, p) for p in pipeline for t in tensor] for d in data],
        "tp": [[rank(t, d, p) for t in tensor] for p in pipeline for d in data],
        "pp": [[rank(t, d, p) for p in pipeline] for d, t in columns],
        "embd": [sorted({rank(t, d, 0), rank(t, d, pp - 1)}) for d, t in columns],
        "pos_embd": [[rank(t, d, 0)] for d, t in columns],
        "tp-dp": [[rank(t, d, p) for d in data for t in tensor] for p in pipeline],
    }


def declared(ranks: int) -> layout.Layout:
    """The same as commkit's layout."""
    return layout.parse(text(ranks), ranks, families=WORDS)


def count(ranks: int) -> int:
    tp, dp, pp = shape(ranks)
    return tp * pp + dp + dp * pp + 3 * tp * dp + pp


def by_torch(members_only: bool) -> Callable[[], list[Any]]:
    """Every rank calls new_group for every group, as frameworks do; or for those it is in."""

    def make() -> list[Any]:
        me, mine = dist.get_rank(), []
        for name, groups in families(dist.get_world_size()).items():
            for ranks in groups:
                if members_only and me not in ranks:
                    continue
                group = dist.new_group(
                    ranks, group_desc=name, use_local_synchronization=members_only
                )
                if me in ranks:
                    mine.append(group)
        return mine

    return make


def by_commkit() -> list[Any]:
    return list(api.new_groups(declared(int(os.environ["WORLD_SIZE"]))).values())


def use(groups: list[Any]) -> None:
    """The first collective of each group; raises if a sum is wrong (fake back ends add nothing)."""
    for group in groups:
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        if dist.get_backend(group) == "gloo" and value.item() != dist.get_world_size(group):
            raise RuntimeError(
                f"all_reduce of ones gave {value.item()} in a group of {group.size()}"
            )


def register() -> None:
    dist.Backend.register_backend("none", _none, devices=["cpu"])
    dist.Backend.register_backend("ids", _ids, extended_api=True, devices=["cpu"])


def _none(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    create: Any = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    return create(rank, size)


def _ids(terms: Any, options: Any) -> Any:
    store, rank, size = terms.store, terms.group_rank, terms.group_size
    if size > _RANKS_A_ROOT:
        roots = -(-size // _RANKS_A_ROOT)
        first = [root * size // roots for root in range(roots)]
        if rank in first:
            store.set(f"UniqueNCCLID:{first.index(rank)}", _ID)
        store.multi_get([f"UniqueNCCLID:{root}" for root in range(roots)])
    elif size > 1 and rank == 0:
        store.set("0", _ID)
    elif size > 1:
        store.get("0")
    return _none(store, rank, size, terms.timeout)
