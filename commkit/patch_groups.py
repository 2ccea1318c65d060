"""torch's ways to create groups, as its members alone: for code that only knows torch.distributed.

Nothing of torch's is written anew: new_group, new_subgroups, split_group, init_device_mesh and what
functional collectives create all go through a few functions of distributed_c10d, and those are
wrapped.  Arguments, checks, errors and what non-members get stay torch's.  What changes while a
world of commkit exists:

- a group's name follows from its back end, its ranks and how often this rank used these, instead of
  from how many groups of any kind this process has created;
- its keys live with the agent of its lowest rank;
- it is not split off the whole world's communicator, which every rank would have to take part in;
- a barrier of the whole world after it (TORCH_DIST_INIT_BARRIER=1) is one reduction over the tree;
- errors name who did not come.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as torch_c10d

from commkit import creation, groups
from commkit.journal import Entry
from commkit.making import Made
from commkit.settings import load
from commkit.trouble import Task, attend

log = logging.getLogger("commkit")

#: Much of it is torch's own business and not declared.
c10d: Any = torch_c10d

#: function -> the parameters, by position, that its wrapper relies on
_EXPECTED = {
    "_new_group_with_tag": ("ranks", "timeout", "backend"),
    "_process_group_name": ("ranks", "use_hashed_name"),
    "_new_process_group_helper": (
        *("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"),
    ),
    "_store_based_barrier": ("rank", "store", "group_name", "rendezvous_count", "timeout"),
    "split_group": ("parent_pg", "split_ranks"),
}

_here = threading.local()

#: (module, name, torch's function) of what is replaced.
_replaced: list[tuple[ModuleType, str, Any]] = []
_told: set[str] = set()


def install() -> None:
    """Wraps torch's functions wherever they are bound; twice changes nothing.

    If this torch's functions are not those that the wrappers were written for, it says so once and
    leaves all of them alone: groups are then torch's own.
    """
    if _replaced:
        return
    if fault := _fault():
        if fault not in _told:
            _told.add(fault)
            log.warning(
                "torch %s creates groups in another way than commkit knows (%s): groups are "
                "torch's own",
                torch.__version__,
                fault,
            )
        return
    for name, ours in _WRAPPERS.items():
        original = getattr(c10d, name)
        wrapper = functools.wraps(original)(partial(ours, original))
        # device_mesh and scripts have bound some of them by name.
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and module.__dict__.get(name) is original:
                setattr(module, name, wrapper)
                _replaced.append((module, name, original))


def uninstall() -> None:
    """Puts torch's functions back."""
    for module, name, original in _replaced:
        setattr(module, name, original)
    _replaced.clear()


def _fault() -> str:
    """What is not as expected in this torch, or ""."""
    for name, expected in _EXPECTED.items():
        function = getattr(c10d, name, None)
        if function is None:
            return f"it has no {name}"
        parameters = tuple(inspect.signature(function).parameters)
        if parameters[: len(expected)] != expected:
            return f"{name} takes {', '.join(parameters[: len(expected)])}"
    return ""


@contextlib.contextmanager
def _within(family: str, rank: int) -> Iterator[None]:
    """While inside, names that torch asks for are those of groups of this family."""
    before = getattr(_here, "naming", None)
    _here.naming = (family, rank)
    try:
        yield
    finally:
        _here.naming = before


@functools.cache
def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _given(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; wrong ones are for the function itself to refuse."""
    return {**dict(zip(_parameters(function), args, strict=False)), **kwargs}


#: What may be given besides `ranks` where a rank that is in no group has nothing to do.
_IDLE = {"ranks", "timeout", "group_desc", "sort_ranks"}


def _idle(given: dict[str, Any], default: Any, rank: int) -> bool:
    """Whether torch would find these arguments right and make nothing on this rank.

    A framework calls for every group of the world on every rank, so this is what it does most.
    """
    ranks: Any = given.get("ranks")
    timeout = given.get("timeout")
    return (
        type(ranks) in (list, tuple, range)
        and rank not in ranks
        and not any(value for name, value in given.items() if name not in _IDLE)
        and (timeout is None or isinstance(timeout, timedelta))
        and {*map(type, ranks)} == {int}
        and len(set(ranks)) == len(ranks)
        and min(ranks) >= 0
        and max(ranks) < default.size()
        and default.bound_device_id is None
        and not callable(getattr(default, "new_group", None))
        and not _barriers()
    )


def _our_new_group_with_tag(original: Any, *args: Any, **kwargs: Any) -> Any:
    joined = groups.joined()
    if joined is None:
        return original(*args, **kwargs)
    given = _given(original, args, kwargs)
    default = c10d._get_default_group()
    if _idle(given, default, joined.world.identity.rank):
        outside = dist.GroupMember.NON_GROUP_MEMBER
        ranks = given["ranks"] if not given.get("sort_ranks", True) else sorted(given["ranks"])
        c10d._process_group_name(ranks, False)  # counts it, as torch does
        c10d._world.pg_group_ranks[outside] = {rank: place for place, rank in enumerate(ranks)}
        return outside
    backend = dist.Backend(given.get("backend") or c10d._world.pg_map[default][0])
    parts = [str(backend)]
    if tag := given.get("pg_tag"):
        if given.get("ranks") and c10d._find_pg_by_ranks_and_tag(tag, given["ranks"]) is not None:
            return original(*args, **kwargs)  # gives that one: nothing is created
        parts.append(tag)
    if given.get("use_local_synchronization") and _barriers():
        # Then non-members do not call, and have not counted it.
        parts.append("local")
    with _within("/".join(parts), joined.world.identity.rank):
        return original(*args, **kwargs)


def _our_process_group_name(original: Any, ranks: Any, use_hashed_name: bool) -> Any:
    naming = getattr(_here, "naming", None)
    theirs = original(ranks, use_hashed_name)  # counts the groups, for get_pg_count()
    if groups.joined() is None or naming is None or not ranks:
        return theirs
    family, rank = naming
    members = tuple(int(member) for member in ranks)
    if rank not in members and not _barriers():
        return "commkit:not a member"
    return groups.generations().named(family, members)


def _our_new_process_group_helper(
    original: Any,
    group_size: int,
    group_rank: int,
    global_ranks_in_group: Any,
    backend: Any,
    store: Any,
    group_name: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    joined = groups.joined()
    ranks = [int(rank) for rank in global_ranks_in_group]
    call = partial(original, group_size, group_rank, ranks, backend)
    if joined is None or getattr(_here, "naming", None) is None or not ranks:
        return call(store, group_name, *args, **kwargs)
    if joined.world.identity.rank not in ranks:
        with _split_or_not():
            return call(store, group_name, *args, **kwargs)
    given = {**dict(zip(_parameters(original)[6:], args, strict=False)), **kwargs}
    timeout: timedelta = given["timeout"]
    desc, device = given.get("group_desc"), given.get("device_id")
    group = Entry(group_name, creation.label_of(desc), tuple(ranks))
    began = time.monotonic()
    joined.journal.begin([group])
    try:
        with joined.connections.one(timeout) as connection:
            meeting = creation.store_for(ranks, connection)
            if len(ranks) == 1 and not given.get("pg_tag"):
                options = given.get("backend_options", given.get("pg_options"))
                pg = creation.alone(
                    group_name, ranks, meeting, str(backend), timeout, options, desc, device
                )
                if pg is not None:
                    _remember(group, str(backend), began, pg)
                    return pg, c10d._world.pg_map[pg][1]

            def create() -> Any:
                with _split_or_not(), creation.on(device):
                    return call(meeting, group_name, *args, **kwargs)

            with joined.world.creating():
                if len(ranks) > 1 and creation.blocks(str(backend), device):
                    joined.meet(group, timeout)
                    what = f"group {group.shown()} ({backend})"
                    (result,) = attend(joined.world, [Task(create, timeout.total_seconds(), what)])
                else:
                    result = create()
    except Exception as error:
        explained = joined.explain(error, group, str(backend), began, timeout)
        if explained is None:
            raise
        raise explained from error
    joined.met(group, creation.connects(str(backend), device))
    _remember(group, str(backend), began, result[0])
    return result


def _remember(group: Entry, backend: str, began: float, pg: Any) -> None:
    seconds = time.monotonic() - began
    groups.remember(Made(group.label, group.ranks, group.name, backend, seconds, pg))


def _our_store_based_barrier(
    original: Any,
    rank: int,
    store: Any,
    group_name: str,
    rendezvous_count: int,
    timeout: timedelta,
    *args: Any,
    **kwargs: Any,
) -> Any:
    joined = groups.joined()
    if joined is None or rendezvous_count != joined.world.identity.world_size:
        return original(rank, store, group_name, rendezvous_count, timeout, *args, **kwargs)
    joined.world.barrier(tag=f"torch/{group_name}", timeout=timeout.total_seconds())
    return None


def _our_split_group(original: Any, *args: Any, **kwargs: Any) -> Any:
    joined = groups.joined()
    given = _given(original, args, kwargs)
    parent: Any = given.get("parent_pg") or dist.group.WORLD
    if joined is None or parent not in c10d._world.pg_group_ranks:
        return original(*args, **kwargs)
    # torch asks for a name with the ranks as the parent numbers them.
    places = c10d._world.pg_group_ranks[parent]
    rank = places.get(joined.world.identity.rank, -1)

    def create() -> Any:
        with _within(f"split/{parent.group_name}", rank), creation.on(parent.bound_device_id):
            return original(*args, **kwargs)

    if rank < 0 or c10d._get_default_group().bound_device_id is None:
        return create()  # is refused by torch, or is TorchComms'
    backend = str(c10d._world.pg_map[parent][0])
    timeout: timedelta = given.get("timeout") or c10d._get_default_timeout(backend)
    # Every rank of the parent takes part, and NCCL has no deadline for those who do not come.
    family, ranks = f"split of {parent.group_desc}", tuple(sorted(places, key=places.__getitem__))
    name = groups.generations().named(f"{family} {parent.group_name}", ranks)
    step = Entry(name, family, ranks)
    began = time.monotonic()
    joined.journal.begin([step])
    try:
        what, missing = f"group {step.shown()} ({backend})", partial(joined.journal.missing, step)
        (pg,) = attend(joined.world, [Task(create, timeout.total_seconds(), what, missing)])
    except Exception as error:
        explained = joined.explain(error, step, backend, began, timeout)
        if explained is None:
            raise
        raise explained from error
    if pg is not None:
        joined.world.connected(pg.group_name, tuple(c10d._world.pg_group_ranks[pg]))
    return pg


def _split_or_not() -> contextlib.AbstractContextManager[None]:
    """COMMKIT_GROUPS=split leaves torch's way: every rank splits for every group."""
    return contextlib.nullcontext() if load().groups == "split" else creation.members_only()


def _barriers() -> bool:
    return bool(c10d._is_barrier_after_init() == 1)


_WRAPPERS: dict[str, Any] = {
    "_new_group_with_tag": _our_new_group_with_tag,
    "_process_group_name": _our_process_group_name,
    "_new_process_group_helper": _our_new_process_group_helper,
    "_store_based_barrier": _our_store_based_barrier,
    "split_group": _our_split_group,
}
