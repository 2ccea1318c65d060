"""Megatron-core's initialize_model_parallel in forked ranks, layout after layout in one world.

    python megatron_world.py BACKEND WORLD_SIZE SEED DEADLINE LAYOUT...
    python -m commkit run megatron_world.py ...            the same, by commkit

LAYOUT is a JSON object of initialize_model_parallel's arguments.  Every rank sleeps a random time
before its calls.  Prints what each rank holds for every layout: the ranks of each group by the name
that Megatron gives it, and what an all_reduce over it has added up.  BACKEND fake: one process that
is every rank in turn, without sums, and fake/31 every 31st; cpu:fake: real ranks without sums.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import time
import warnings
from datetime import timedelta

warnings.simplefilter("ignore")

import forked  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

#: One call in so many is late, by up to so many seconds.
LATE_CALLS, LATE_SECONDS = 20, 0.05

#: What parallel_state knows before it has made anything.
FRESH = {
    name: value
    for name, value in vars(parallel_state).items()
    if name.startswith("_") and not name.startswith("__") and not callable(value)
}


def groups():
    """Every group that parallel_state holds, by its variable and its place in a list or dict."""
    found = {}
    for name in FRESH:
        value = getattr(parallel_state, name)
        if name == "_global_process_group_list":
            continue
        several = dict(enumerate(value)) if isinstance(value, list) else value
        if not isinstance(several, dict):
            several = {"": value}
        for key, group in several.items():
            if isinstance(group, dist.ProcessGroup):
                found[f"{name}{key}"] = group
    return found


def numbers():
    """The lists of ranks and the sizes that parallel_state keeps beside the groups."""
    kept = {}
    for name in dir(parallel_state):
        if name.endswith(("_GLOBAL_RANKS", "_WORLD_SIZE")):
            kept[name] = getattr(parallel_state, name)
        if name.startswith("get_") and name.endswith(("_world_size", "_parallel_rank")):
            try:
                kept[name] = getattr(parallel_state, name)()
            except (AssertionError, TypeError):
                kept[name] = None
    return kept


def forget():
    parallel_state.destroy_model_parallel()
    # It leaves some of its variables as they were.
    vars(parallel_state).update(copy.deepcopy(FRESH))


def added_up(group, rank, seed):
    """Sums over a group of what depends on the rank alone: exact, whatever the order."""
    mine = random.Random(f"{seed}/{rank}").randrange(1 << 30)
    tensor = torch.tensor([1, rank + 1, (rank + 1) ** 2, mine], dtype=torch.int64)
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def layout_of(arguments, rank, seed, sums):
    # The gloo groups beside them would connect: not on the fake back end.
    parallel_state.initialize_model_parallel(**arguments, create_gloo_process_groups=sums)
    made = groups()
    found = {
        "groups": {name: dist.get_process_group_ranks(group) for name, group in made.items()},
        "descriptions": {name: group.group_desc for name, group in made.items()},
        "numbers": numbers(),
        "sums": {},
    }
    if sums:
        for name, group in made.items():
            found["sums"][name] = added_up(group, rank, seed)
    names = [group.group_name for group in made.values()]
    forget()
    return found, names


def late(call, rng):
    def wrapper(*args, **kwargs):
        if rng.randrange(LATE_CALLS) == 0:
            time.sleep(rng.uniform(0, LATE_SECONDS))
        return call(*args, **kwargs)

    return wrapper


def rank_of(backend, seed, layouts):
    rank = int(os.environ["RANK"])
    rng = random.Random(f"{seed}/{rank}/late")
    time.sleep(rng.uniform(0, 0.2))
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    dist.new_group = late(dist.new_group, rng)
    found, names = [], []
    for arguments in layouts:
        time.sleep(rng.uniform(0, 0.2))
        one, its = layout_of(arguments, rank, seed, sums=backend == "gloo")
        found.append(one)
        names += its
    by_commkit = forked.by_commkit()
    dist.destroy_process_group()
    return {"rank": rank, "layouts": found, "by_commkit": by_commkit, "names": names}


def ranks_in_turn(ranks, world_size, seed, layouts):
    """These ranks one after the other, on torch's back end that does nothing."""
    results = []
    for rank in ranks:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        found = [layout_of(arguments, rank, seed, sums=False)[0] for arguments in layouts]
        by_commkit = forked.by_commkit()
        results.append({"rank": rank, "layouts": found, "by_commkit": by_commkit, "names": []})
        dist.destroy_process_group()
    return results


def main():
    backend, world_size, seed, deadline, *layouts = sys.argv[1:]
    layouts = [json.loads(text) for text in layouts]
    if backend.startswith("fake"):
        ranks = range(0, int(world_size), int(backend.partition("/")[2] or 1))
        forked.report(ranks_in_turn(ranks, int(world_size), seed, layouts))
        return
    forked.report(
        forked.run(int(world_size), rank_of, backend, seed, layouts, deadline=float(deadline))
    )


if __name__ == "__main__":
    main()
