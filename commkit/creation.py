"""One torch process group, made by its members only.

torch's own helper does the work, so that every back end, option and debug wrapper is as torch has
it.  What is kept from it is the split of the whole world's communicator, which needs every rank
(non-members too) at every group: members get a communicator of their own from a fresh id instead.
A group of one opens nothing: no socket, and no communicator before it is used.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as torch_c10d
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store

#: Much of it is torch's own business and not declared.
c10d: Any = torch_c10d

#: torch's helper, bound before anything can replace it.
helper = c10d._new_process_group_helper
torch_split_group = c10d.split_group
_PARAMETERS = inspect.signature(helper).parameters
_OPTIONS = "backend_options" if "backend_options" in _PARAMETERS else "pg_options"

_here = threading.local()
_device_lock = threading.Lock()
_lone_device: list[Any] = []


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """While inside, this thread's groups get this name from torch."""
    _observe_names()
    _here.name = name
    try:
        yield
    finally:
        del _here.name


def _observe_names() -> None:
    names = c10d._process_group_name
    if hasattr(names, "_commkit"):
        return

    @functools.wraps(names)
    def given_first(ranks: Any, use_hashed_name: bool) -> Any:
        name = getattr(_here, "name", None)
        return names(ranks, use_hashed_name) if name is None else name

    given_first._commkit = True  # type: ignore[attr-defined]
    c10d._process_group_name = given_first


@contextlib.contextmanager
def members_only() -> Iterator[None]:
    """While inside, this thread's new groups are not split off the default group's communicator."""
    _observe_split_source()
    before = getattr(_here, "members_only", False)
    _here.members_only = True
    try:
        yield
    finally:
        _here.members_only = before


def _observe_split_source() -> None:
    source = getattr(c10d, "_get_split_source", None)
    if source is None or hasattr(source, "_commkit"):
        return

    @functools.wraps(source)
    def members_first(pg: Any) -> Any:
        return None if getattr(_here, "members_only", False) else source(pg)

    members_first._commkit = True  # type: ignore[attr-defined]
    c10d._get_split_source = members_first


def on(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """While inside, `device` is this thread's current one: a new thread's would be the first GPU,
    and whatever then asks the driver makes a context there."""
    if device is None or device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def store_for(ranks: Sequence[int], base: Store) -> Store:
    """Keys of a group live with the agent of its lowest rank: a group in one host stays there."""
    return PrefixStore(f"commkit:{min(ranks)}", base)


@functools.cache
def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def backends(backend: str) -> Mapping[str, str]:
    """device type -> back end of a string as torch takes it: "gloo", "cpu:gloo,cuda:nccl"."""
    return MappingProxyType(dist.BackendConfig(dist.Backend(backend)).get_device_backend_map())


def connects(backend: str, device: torch.device | None) -> bool:
    """Whether the creation of a group of this back end waits for the other members."""
    names = set(backends(backend).values())
    lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") == "1" and torch_version() >= (2, 8)
    return ("gloo" in names and not lazy) or blocks(backend, device)


def blocks(backend: str, device: torch.device | None) -> bool:
    """Whether that wait has no deadline of torch's: a communicator made at once."""
    names = set(backends(backend).values())
    return device is not None and bool(names - {"gloo", "fake", "mpi"})


def create(
    name: str,
    ranks: Sequence[int],
    store: Store,
    *,
    backend: str,
    timeout: timedelta,
    options: Any = None,
    desc: str | None = None,
    device: torch.device | None = None,
) -> ProcessGroup:
    """The group of `ranks` (global, in group order, this one among them), called `name`.

    `store` is where the members meet, under keys that begin with `name`.  With a `device` the
    communicator is made now, otherwise when it is first used.  Raises what torch raises.
    """
    ranks = list(ranks)
    me = ranks.index(c10d._get_default_group().rank())
    if options is not None:
        # torch writes the group's name and ranks into it.
        options = copy.deepcopy(options)
    pg: Any = None
    if len(ranks) == 1:
        pg = alone(name, ranks, store, backend, timeout, options, desc, device)
    if pg is None:
        extra: dict[str, Any] = {_OPTIONS: options, "group_desc": desc}
        if device is not None:
            extra["device_id"] = device
        with members_only(), on(device):
            pg, _ = helper(
                len(ranks),
                me,
                ranks,
                dist.Backend(backend),
                store,
                name,
                timeout=timeout,
                **extra,
            )
    c10d._world.pg_group_ranks[pg] = {rank: index for index, rank in enumerate(ranks)}
    return pg  # type: ignore[no-any-return]


def splits(backend: str, device: torch.device | None) -> bool:
    """Whether torch can split a group of this back end off the default one."""
    if device is None or set(backends(backend).values()) != {"nccl"}:
        return False
    default = c10d._get_default_group()
    return bool(default._get_backend(device).supports_splitting)


def split(
    name: str,
    ranks: Sequence[int],
    member: bool,
    *,
    timeout: timedelta,
    options: Any = None,
    desc: str | None = None,
) -> ProcessGroup | None:
    """The group of `ranks` (ascending), split off the default group: every rank has to call it.

    At the same time other ranks may call it with other ranks; a rank that is in no group gives any
    other's and gets None.
    """
    with named(name), on(c10d._get_default_group().bound_device_id):
        pg = torch_split_group(None, [list(ranks)], timeout, options, desc)
    return pg if member else None


def alone(
    name: str,
    ranks: list[int],
    store: Store,
    backend: str,
    timeout: timedelta,
    options: Any,
    desc: str | None,
    device: torch.device | None,
) -> ProcessGroup | None:
    """A group of one, of gloo and NCCL; None if torch's helper has to make it."""
    devices = backends(backend)
    known = {"gloo": c10d.Backend.GLOO, "nccl": c10d.Backend.NCCL}
    if not set(devices.values()) <= set(known) or _wrapped():
        return None
    prefix = PrefixStore(f"{name}/", store)
    pg: Any = ProcessGroup(prefix, 0, 1)
    kinds = {"gloo": ProcessGroup.BackendType.GLOO, "nccl": ProcessGroup.BackendType.NCCL}
    pg._set_default_backend(kinds["nccl" if "nccl" in devices.values() else "gloo"])
    made: dict[str, Any] = {}
    for place, kind in devices.items():
        if kind not in made:
            inner = PrefixStore(f"{place}/", prefix)
            make = _lone_gloo if kind == "gloo" else _lone_nccl
            made[kind] = make(inner, timeout, options, ranks, name)
            made[kind]._set_sequence_number_for_group()
        pg._register_backend(torch.device(place), kinds[kind], made[kind])
    pg._set_group_name(name)
    pg._set_group_desc(desc or "undefined")
    if device is not None:
        pg.bound_device_id = device
    _register(
        pg, dist.Backend(backend), prefix, name, str(dist.BackendConfig(dist.Backend(backend)))
    )
    return pg  # type: ignore[no-any-return]


def _lone_gloo(store: Store, timeout: timedelta, _: Any, ranks: list[int], name: str) -> Any:
    kind = c10d.ProcessGroupGloo
    with _device_lock:
        if not _lone_device:
            # A device is a listener and a thread; those who never connect need one together.
            _lone_device.append(kind.create_default_device())
    options = kind._Options()
    options._devices = list(_lone_device)
    options._timeout = timeout
    if hasattr(options, "global_ranks_in_group"):  # not before torch 2.7
        options.global_ranks_in_group, options.group_name = ranks, name
    return kind(store, 0, 1, options)


def _lone_nccl(store: Store, timeout: timedelta, options: Any, ranks: list[int], name: str) -> Any:
    kind = c10d.ProcessGroupNCCL
    if options is None:
        options = kind.Options()
    options._timeout = timeout
    options.global_ranks_in_group, options.group_name = ranks, name
    return kind(store, 0, 1, options)


def label_of(desc: str | None) -> str:
    """What people call a group whose group_desc is this."""
    return "" if desc in (None, "undefined") else str(desc)


def _wrapped() -> bool:
    """Whether torch puts debugging or other libraries' layers around back ends."""
    if c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
        return True
    torchcomms = getattr(c10d, "_use_torchcomms_enabled", None)
    return bool(torchcomms is not None and torchcomms())


def _register(pg: ProcessGroup, backend: Any, store: Store, name: str, config: str) -> None:
    # The six things that every torch since 2.4 keeps about a group.
    world = c10d._world
    world.pg_map[pg] = (backend, store)
    world.pg_names[pg] = name
    world.pg_backend_config[pg] = config
    c10d._register_process_group(name, pg)
    tag = f"ptd:{name}"
    world.tags_to_pg.setdefault("", []).append(pg)
    world.tags_to_pg.setdefault(tag, []).append(pg)
    world.pg_to_tag[pg] = tag


def _forget() -> None:
    # A forked child is no rank: what its parent's groups opened is not used there.
    global _device_lock
    _device_lock = threading.Lock()  # another thread may have held it
    _lone_device.clear()


os.register_at_fork(after_in_child=_forget)
