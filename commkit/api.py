"""torch.distributed.init_process_group and destroy_process_group over the agent tree.

init_process_group takes torch's arguments.  It finds the world (launch), joins the agent tree
(overlay), and hands torch a store that the host's own agent serves; afterwards torch.distributed is
in the state that torch's own function would have left it in.  There is no central store.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import inspect
import logging
import os
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from commkit import creation, devices, groups, launch, overlay, rendezvous, report
from commkit.environ import Exported, check_gloo_interface, described
from commkit.errors import CommkitError, DigestMismatch, LaunchError, RankDied, UsageError
from commkit.groups import (
    device_mesh as device_mesh,
)
from commkit.groups import (
    get_group as get_group,
)
from commkit.groups import (
    get_groups as get_groups,
)
from commkit.groups import (
    new_group as new_group,
)
from commkit.groups import (
    new_groups as new_groups,
)
from commkit.groups import (
    split_group as split_group,
)
from commkit.layout import Layout
from commkit.settings import load
from commkit.store import open_store
from commkit.trouble import Task, attend, explain, first_line

if TYPE_CHECKING:
    from commkit.observed import Running
    from commkit.topology.fabric import Fabric

log = logging.getLogger("commkit")

#: Seconds that destroy_process_group waits for ranks that have not finished creating their groups.
LEAVE_TIMEOUT = 30.0

#: gloo connects all pairs of ranks when it creates a group, so that an operation's timeout holds
#: from the first one.  In larger worlds that takes longer than the contacts that are needed.
EAGER_WORLD = 32

#: Where torch keeps what register_rendezvous_handler was told.
_HANDLERS = "_rendezvous_handlers"

# Bound before anything can replace them.
_torch_init: Any = c10d.init_process_group
_torch_destroy: Any = c10d.destroy_process_group
_TORCH_PARAMETERS = tuple(inspect.signature(_torch_init).parameters)


@dataclass
class _Live:
    """The world behind torch's default group."""

    world: overlay.World
    exported: Exported = field(default_factory=Exported)
    report: str = ""  # where a report of the start-up is to be written, "": nowhere


_live: _Live | None = None
_phases: dict[str, float] = {}
_told: set[str] = set()

#: Whether this stands in for torch's own functions: then nothing is done that those do not do.
as_torch = False


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any | None = None,
    device_id: torch.device | int | None = None,
    *,
    layout: str | Layout | Mapping[str, Iterable[Any]] | None = None,
    topology: object = None,
    **rest: Any,
) -> None:
    """Starts torch.distributed over the agent tree; returns when every rank has joined.

    The arguments are torch's, in torch's order, and mean what they mean there; `rest` takes those
    that the running torch has besides.  `timeout` (torch's default: 10 minutes for nccl, 30
    otherwise) is also the one deadline of the join.  RANK, WORLD_SIZE, LOCAL_RANK and
    LOCAL_WORLD_SIZE are set in os.environ where absent, until the group is destroyed.
    In worlds of more than EAGER_WORLD ranks gloo connects lazily on torch >= 2.8 unless
    TORCH_GLOO_LAZY_INIT is set; then a first contact with a peer that does not come waits for five
    times the group's timeout, whatever the operation's own.

    Where NCCL is used without `device_id`, each rank binds its current GPU if it has chosen one,
    else that of its local rank, so that communicators are made at once: on all ranks, or on none.
    COMMKIT_BIND=off leaves it to torch, as do commkit.patch() and commkit run.

    With `store`, the backends fake and mpi, an init_method of a scheme that another library has
    registered, or COMMKIT_DISABLE=1, torch's own function does all the work.

    `layout` ("tp=8,pp=4,dp=-1", a Layout, or lists of ranks by family) is handed to new_groups once
    the default group exists; get_group gives its groups.

    `topology` moves whole hosts to other ranks, for traffic that crosses few switches: the path of
    what `commkit place --emit perm` has written, or, together with `layout`, of a description of
    the fabric (or a Fabric); None: COMMKIT_TOPOLOGY.  A process keeps its local rank; RANK, and
    torchrun's GROUP_RANK and ROLE_RANK, are rewritten until the group is destroyed.  Ranks whose
    files differ do not form a world.

    Raises UsageError (an argument), LaunchError (the environment), JoinTimeout naming the missing
    ranks and hosts, JoinError (duplicate rank, unequal world sizes, a group that could not be
    created), DigestMismatch (the ranks' layouts differ), RankDied naming the ranks that died
    meanwhile; ValueError, as torch does, if the default group exists.  After an error this rank has
    left the tree.
    """
    global _live
    for name in rest:
        if name not in _TORCH_PARAMETERS:
            raise TypeError(
                f"init_process_group() got an unexpected keyword argument {name!r}: torch "
                f"{torch.__version__} takes {', '.join(_TORCH_PARAMETERS)}; commkit adds layout "
                "and topology"
            )
    stock = functools.partial(
        _torch_init,
        backend=backend,
        init_method=init_method,
        timeout=timeout,
        world_size=world_size,
        rank=rank,
        store=store,
        group_name=group_name,
        pg_options=pg_options,
        device_id=device_id,
        **rest,
    )
    settings = load()
    if settings.disable or dist.is_initialized():
        stock()  # the second case is torch's own error
        _groups_of(layout)
        return
    leave_world()  # of a default group that ended unseen
    names = set() if store is not None else _check_backend(backend, device_id)
    reason = _reason_for_stock(backend, init_method, store)
    if reason and topology is not None:
        raise UsageError(
            f"topology={topology!r}: {reason}, so that no rank can be moved; leave it out"
        )
    if reason:
        if reason not in _told:
            _told.add(reason)
            log.warning("%s: torch starts this group by itself, without commkit's tree", reason)
        stock()
        _groups_of(layout)
        return

    limit = _check_timeout(timeout, names)
    deadline = time.monotonic() + limit.total_seconds()
    _phases.clear()
    lap = _Laps()
    spec = launch.resolve(
        init_method=init_method, rank=rank, world_size=world_size, settings=settings
    )
    declared = groups.as_layout(layout, spec.world_size) if layout is not None else None
    moved: dict[str, str] = {}
    if topology is not None or (settings.topology and spec.world_size > 1):
        from commkit import reorder  # what it needs takes long to import, and few jobs need it

        spec, moved = reorder.apply(
            spec,
            reorder.load(topology, settings),
            layout if isinstance(layout, str) else declared,
            settings,
            deadline - time.monotonic(),
        )
    if settings.report and spec.rank == 0:
        report.check_path(settings.report)
    lap("resolve")
    world = overlay.join(spec, deadline - time.monotonic(), settings=settings)
    lap("join")
    _observe_torch()
    live = _live = _Live(world)
    what = f"the default process group ({', '.join(sorted(names))})"
    try:
        live.exported.replace(moved)
        live.exported.add(_variables(world, names))
        with world.creating():
            if device_id is None and "nccl" in names and settings.bind == "auto" and not as_torch:
                device_id = devices.automatic(world, max(0.0, deadline - time.monotonic()))
            bound = devices.claim(world, device_id)
            base = open_store(world, deadline - time.monotonic(), settings=settings)
            # A death from now on breaks the waits of this store; one before it would not.
            if failures := world.failures():
                raise RankDied("; ".join(failures))
            base.set_timeout(limit)
            groups.attach(world, base, limit)
            lap("store")
            begin = functools.partial(
                stock,
                init_method=None,
                world_size=spec.world_size,
                rank=spec.rank,
                device_id=device_id,
                # The prefix that torch gives the store of its own rendezvous.
                store=PrefixStore("default_pg", base),
            )
            if bound:
                # NCCL, which makes its communicator now, has no deadline for a missing rank.
                world.barrier(tag="bound", timeout=max(0.0, deadline - time.monotonic()))
                attend(world, [Task(begin, deadline - time.monotonic(), what)])
            else:
                begin()
            lap("process_group")
        world.connected("default_pg", range(spec.world_size))
        if declared is not None:
            groups.new_groups(declared)
            lap("groups")
    except BaseException as error:
        explained = explain(world, error, what, deadline)
        _abandon(live, error)
        if explained is None:
            raise
        raise explained from error
    c10d._default_pg_init_method = init_method or "env://"
    if settings.report:
        live.report = settings.report
        atexit.register(_report)  # for those that end without destroy_process_group


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """torch's destroy_process_group; the end of the default group also leaves the agent tree.

    Leaving waits until the members of this rank's groups have finished creating them, at most
    LEAVE_TIMEOUT seconds.  torch.distributed.destroy_process_group itself does the same while a
    world of commkit exists.  Errors are torch's; trouble on the way out of the tree is logged.
    """
    _torch_destroy(group)


def world() -> overlay.World | None:
    """The agent tree's world behind torch's default group; None if commkit did not start it."""
    return _live.world if _live is not None else None


def is_initialized() -> bool:
    """Whether the default group exists and commkit started it."""
    return _live is not None and dist.is_initialized()


def start_up_phases() -> dict[str, float]:
    """Seconds that the last init_process_group spent in resolve, join, store and process_group."""
    return dict(_phases)


def start_report(*, first_use: bool = False, timeout: float = 300.0) -> dict[str, Any] | None:
    """What each phase of the start-up took on the slowest, the median and the fastest rank.

    Every rank calls it; rank 0 gets the report, the others None.  Its `phases` are, in order:
    resolve, join, store, process_group, digest, groups (all of new_groups), create/FAMILY for each
    family, first_use/FAMILY; each has `slowest`, `median` and `fastest` with `seconds`, `rank` and
    `host`, and `ranks`, the number of ranks that had that phase.  With `first_use` each rank first
    runs one small all_reduce on each of its groups, in the order in which they were made.

    None on every rank, with a warning, where torch started the world by itself.  Raises
    OverlayTimeout naming who did not come within `timeout` seconds, RankDied.
    """
    if _live is None:
        log.warning("start_report: torch started this world by itself; there is no report")
        return None
    return report.start(_live.world, _phases, first_use, timeout)


def running_topology(network: Fabric | None = None, *, timeout: float = 300.0) -> Running | None:
    """What the hosts of this job are: accelerators, NICs, NUMA nodes and the ways between them.

    Every rank calls it; rank 0 gets the hosts in rank order with their ranks, the others None.
    `network` (commkit.topology.read of a file, at rank 0) adds switches, matched by host names.

    None on every rank, with a warning, where torch started the world by itself.  Raises
    OverlayTimeout naming who did not come within `timeout` seconds, RankDied.
    """
    if _live is None:
        log.warning("running_topology: torch started this world by itself; nobody is asked")
        return None
    from commkit import observed

    return observed.gather(_live.world, network, busid=devices.address(), timeout=timeout)


def _report() -> None:
    """This rank's part of the report that COMMKIT_REPORT asks for; once a world."""
    atexit.unregister(_report)
    if _live is not None and _live.report:
        path, _live.report = _live.report, ""
        report.leave(_live.world, _phases, path)


def leave_world() -> None:
    """Leaves the tree if this process is in it.  Called when torch's default group ends."""
    global _live
    _report()
    live, _live = _live, None
    if live is None:
        return
    groups.detach()
    rendezvous.forget()
    live.exported.withdraw()
    began = time.monotonic()
    try:
        # False at once: a rank was lost or the agent is gone, and nobody is left to wait for.
        if not live.world.leave(LEAVE_TIMEOUT) and time.monotonic() - began >= LEAVE_TIMEOUT:
            log.warning(
                "left the world after %.0f s although not every member of this rank's groups had "
                "connected",
                LEAVE_TIMEOUT,
            )
    except CommkitError as error:
        log.warning("leaving the world: %s", error)


def _forget() -> None:
    # A forked child shares neither the connection nor the membership of its parent.
    global _live
    _live = None


os.register_at_fork(after_in_child=_forget)


def _observe_torch() -> None:
    """Makes the end of torch's default group known to commkit, whoever ends it.

    torch offers no callback, scripts bind destroy_process_group by name before commkit is asked
    for anything, and groups are also aborted: what all of these call is this setter.
    """
    rendezvous.observe(world)
    setter: Any = getattr(c10d, "_update_default_pg", None)
    if setter is None or hasattr(setter, "_commkit"):
        return  # without the setter the world is left by the next init or at exit

    @functools.wraps(setter)
    def observed(pg: Any) -> None:
        setter(pg)
        if pg is None:
            leave_world()

    observed._commkit = True  # type: ignore[attr-defined]
    c10d._update_default_pg = observed


def _groups_of(layout: str | Layout | Mapping[str, Iterable[Any]] | None) -> None:
    if layout is not None:
        groups.new_groups(layout)


class _Laps:
    """Writes down in _phases how long each part of a start-up took."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def __call__(self, name: str) -> None:
        now = time.monotonic()
        _phases[name], self._since = now - self._since, now


def _reason_for_stock(backend: str | None, init_method: str | None, store: Store | None) -> str:
    if store is not None:
        return "a store was passed to init_process_group"
    if isinstance(backend, str) and backend.lower() == "fake":
        return "the fake backend has no peers"
    if isinstance(backend, str) and backend.lower() == "mpi":
        return "the mpi backend takes ranks and connections from MPI"
    if isinstance(init_method, str):
        scheme = urlsplit(init_method).scheme
        handlers = getattr(importlib.import_module("torch.distributed.rendezvous"), _HANDLERS, {})
        if scheme not in ("env", "tcp", "file") and scheme in handlers:
            return f"init_method {scheme}:// has a rendezvous of its own"
    return ""


def _check_backend(backend: str | None, device_id: torch.device | int | None) -> set[str]:
    """The names of the back ends that will be made, after a look at whether they can be."""
    if backend is None:
        device = device_id if isinstance(device_id, torch.device) else None
        if isinstance(device_id, int):
            device = torch.accelerator.current_accelerator()
        backend = dist.Backend.default_device_backend_map.get(device.type) if device else None
        if backend is None:
            return {"undefined"}
    if not isinstance(backend, str):
        raise UsageError(f"backend={backend!r}: expected a name such as 'nccl' or None")
    names = {part.rpartition(":")[2].strip() for part in backend.lower().split(",")}
    known = {*map(str.lower, dist.Backend.backend_list), "fake"}
    for name in sorted(names):
        if name not in known:
            choice = ", ".join(sorted(known - {"undefined"}))
            raise UsageError(
                f"backend={backend!r}: no back end is called {name!r}; expected one of {choice}, "
                "or device:backend pairs such as cpu:gloo,cuda:nccl"
            )
        available = getattr(dist, f"is_{name}_available", None)
        if available is not None and not available():
            raise UsageError(
                f"backend={backend!r}: torch {torch.__version__} was built without {name}; "
                "choose another back end or install a torch that has it"
            )
    if "gloo" in names:
        check_gloo_interface()
    if "nccl" in names and torch.cuda.device_count() == 0:
        raise LaunchError(
            f"backend={backend!r} needs a GPU and torch sees none "
            f"({described('CUDA_VISIBLE_DEVICES')}); make one visible or use gloo"
        )
    devices.check_bound(device_id)
    return names


def _check_timeout(timeout: timedelta | None, names: set[str]) -> timedelta:
    if timeout is None:
        nccl = names == {"nccl"} and default_pg_nccl_timeout is not None
        return default_pg_nccl_timeout if nccl else default_pg_timeout  # type: ignore[return-value]
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise UsageError(f"timeout={timeout!r}: expected a positive datetime.timedelta")
    return timeout


def _variables(world: overlay.World, names: set[str]) -> dict[str, str]:
    me = world.identity
    variables = {
        "RANK": str(me.rank),
        "WORLD_SIZE": str(me.world_size),
        "LOCAL_RANK": str(me.local_rank),
        "LOCAL_WORLD_SIZE": str(me.local_world_size),
    }
    large = me.world_size > EAGER_WORLD
    if large and names & {"gloo", "undefined"} and creation.torch_version() >= (2, 8):
        # torch reads it whenever it makes a gloo group, so later groups are lazy as well.
        variables["TORCH_GLOO_LAZY_INIT"] = "1"
    if names & {"gloo", "undefined"} and me.interface:
        # gloo by itself takes what this host's name resolves to, often an address of loopback.
        variables["GLOO_SOCKET_IFNAME"] = me.interface
    return variables


def _abandon(live: _Live, error: BaseException) -> None:
    """Ends this rank's membership after a failed creation; the others learn the reason at once."""
    global _live
    _live = None
    groups.detach()
    rendezvous.forget()
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            _torch_destroy()
    live.exported.withdraw()
    if live.world.failures() or isinstance(error, DigestMismatch):
        # The others know, or hear the same.
        with contextlib.suppress(CommkitError):
            live.world.leave(0.0)
    else:
        # The cause is here, and an ordinary end would not stop what the others wait for.
        live.world.abandon(f"{type(error).__name__}: {first_line(error)}")
    # The frames of the error hold the store's connection and half of a group.
    traceback.clear_frames(error.__traceback__)
