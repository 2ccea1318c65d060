"""An order of hosts, applied to this process before anything reads its rank.

Whole hosts move: each takes on the ranks that the order has for it, and a process keeps its local
rank.  The order is a file of `commkit place --emit perm`, or is computed from a description of the
fabric and the layout, by rank 0, in a world of the launcher's ranks that is left at once.

A host is found in the file by its name, so that it does not matter in which order the launcher came
to the hosts this time, and applying a file twice changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from commkit import errors, launch, overlay
from commkit.errors import CommkitError, LaunchError, UsageError
from commkit.launch import LaunchSpec
from commkit.layout import Layout
from commkit.settings import Settings
from commkit.topology import readers
from commkit.topology.emit import Permutation, is_permutation, permutation, read_permutation
from commkit.topology.fabric import Fabric
from commkit.topology.plain import to_plain
from commkit.topology.readers.source import content

log = logging.getLogger("commkit")

#: Seconds for the last ranks to leave the world in which an order was computed.
_LEAVING = 10.0


@dataclass(frozen=True, slots=True)
class Topology:
    """What topology= or COMMKIT_TOPOLOGY names.

    where    how errors call it: "topology=perm.json"
    digest   equal on two ranks exactly when they would order the hosts alike
    order    None: it is to be computed from `fabric`, the path of a description or a Fabric
    """

    where: str
    digest: str
    order: Permutation | None = None
    fabric: str | Fabric = ""

    @property
    def label(self) -> str:
        """What agents compare: the digest, a blank, and what errors quote."""
        return f"{self.digest} {self.where}"


def load(topology: object, settings: Settings) -> Topology:
    """`topology`: a path, a Permutation or a Fabric; None: COMMKIT_TOPOLOGY, which is set then.

    Raises UsageError for what cannot be read or is no order of hosts.
    """
    if isinstance(topology, Permutation):
        return Topology("topology=Permutation", topology.digest, topology)
    if isinstance(topology, Fabric):
        plain = json.dumps(to_plain(topology), sort_keys=True)
        digest = hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()
        return Topology("topology=Fabric", digest, None, topology)
    if topology is None:
        path, name = settings.topology, "COMMKIT_TOPOLOGY"
    elif isinstance(topology, str | os.PathLike) and os.fspath(topology):
        path, name = os.fsdecode(topology), "topology"
    else:
        raise UsageError(
            f"topology={topology!r}: expected the path of a placement (commkit place --emit perm) "
            "or of a description of the fabric, or a Fabric"
        )
    where = f"{name}={path}"
    try:
        text = content(readers.file_of(path)[0])
    except UsageError as error:
        raise type(error)(f"{name}={error}") from None
    if is_permutation(text):
        order = read_permutation(text, where)
        return Topology(where, order.digest, order)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Topology(where, digest, None, path)


def apply(
    spec: LaunchSpec,
    topology: Topology,
    layout: str | Layout | None,
    settings: Settings,
    timeout: float,
) -> tuple[LaunchSpec, dict[str, str]]:
    """This process's spec with the rank that it takes on, and the variables that say so.

    Raises UsageError and LaunchError, and while an order is being computed what overlay.join
    raises, TopologyError and NoTopology: these on every rank.
    """
    given = _launcher_rank(spec, settings)
    spec = replace(spec, rank=given, launcher_rank=given, placement=topology.label)
    if topology.order is not None:
        return _moved(spec, topology, topology.order, by_name=True)
    if layout is None:
        raise UsageError(
            f"{topology.where} describes a fabric: an order of hosts needs a layout too; pass "
            "layout=, or give the file that commkit place --emit perm writes"
        )
    order = _computed(spec, topology, layout, settings, timeout)
    return _moved(spec, topology, order, by_name=False)


def rewrite_environment(environ: MutableMapping[str, str], settings: Settings) -> None:
    """For `commkit run`: RANK, before the script can read it.

    Only torch's own variables say enough at this point; for what other launchers say, and for ranks
    that a script numbers itself, init_process_group moves them.
    """
    if not settings.topology:
        return
    topology = load(None, settings)
    complete = all(environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if topology.order is None or not complete:
        return
    try:
        spec = launch.resolve(environ, settings=settings)
    except LaunchError:
        return  # perhaps the script passes arguments; if not, init_process_group raises it
    if spec.world_size == 1:
        return
    moved, variables = apply(spec, topology, None, settings, 0.0)
    environ.update(variables)
    environ["COMMKIT_PLACED"] = _mark(moved.launcher_rank or 0, moved.rank, environ)


def _mark(launcher_rank: int, rank: int, environ: Mapping[str, str]) -> str:
    # The port tells this job from one that the script starts, whose ranks inherit the variable.
    return f"{launcher_rank}:{rank}:{environ.get('MASTER_PORT', '')}"


def _launcher_rank(spec: LaunchSpec, settings: Settings) -> int:
    """The rank that the launcher gave, also where `commkit run` has rewritten RANK."""
    was = settings.placed.partition(":")[0]
    if was and settings.placed == _mark(int(was), spec.rank, os.environ):
        return int(was)
    return spec.rank


def _moved(
    spec: LaunchSpec, topology: Topology, order: Permutation, *, by_name: bool
) -> tuple[LaunchSpec, dict[str, str]]:
    """by_name=False: the order's hosts are in the order of this job's launcher."""
    where, each, given = topology.where, order.ranks_per_host, spec.rank
    if len(order.rank) != spec.world_size:
        raise LaunchError(
            f"{where} places {len(order.rank)} ranks on {len(order.hosts)} hosts, but "
            f"{spec.origins.get('world_size', 'the world')} makes a world of {spec.world_size}; "
            "place the hosts of this job, or leave the placement out"
        )
    if spec.local_world_size not in (None, each):
        raise LaunchError(
            f"{where} places {each} ranks on each host, but "
            f"{spec.origins.get('local_world_size', 'this host')} makes {spec.local_world_size} "
            f"here; place with --ranks-per-host {spec.local_world_size}"
        )
    local = given % each if spec.local_rank is None else spec.local_rank
    if given % each != local:
        raise LaunchError(
            f"rank {given} has the local rank {local} of {each}: the launcher has not given a "
            f"host's ranks one after the other, and {where} moves whole hosts; start the job with "
            "block distribution"
        )
    physical = _position(spec.host.names, order.hosts, where) if by_name else given // each
    rank = order.rank[physical * each] + local
    root = spec.root
    if root.here is None:
        root = replace(root, here=given < each)  # the launcher's rank 0, wherever rank 0 is now
    moved = replace(spec, rank=rank, root=root)
    variables = {"RANK": str(rank)}
    if "GROUP_RANK" in os.environ:
        variables["GROUP_RANK"] = str(rank // each)
    if os.environ.get("ROLE_WORLD_SIZE") == str(spec.world_size):
        variables["ROLE_RANK"] = str(rank)
    return moved, variables


def _position(mine: Sequence[str], hosts: Sequence[str], where: str) -> int:
    """The index of this host; its name may be longer or shorter than the file's by a domain."""
    for name in mine:
        if name in hosts:
            return hosts.index(name)
    for name in mine:
        near = [i for i, host in enumerate(hosts) if _same_host(name, host)]
        if len(near) == 1:
            return near[0]
    some = ", ".join(hosts[:8]) + (", ..." if len(hosts) > 8 else "")
    raise LaunchError(
        f"{where}: this host is called {' or '.join(mine)}, which is none of the file's "
        f"{len(hosts)}: {some}; place the hosts of this job, or set COMMKIT_HOST_NAME to this "
        "host's name there"
    )


def _same_host(a: str, b: str) -> bool:
    a, b = a.lower(), b.lower()
    return a == b or a.startswith(b + ".") or b.startswith(a + ".")


# --- Computing an order in a world of the launcher's ranks --------------------------------------


def _computed(
    spec: LaunchSpec,
    topology: Topology,
    layout: str | Layout,
    settings: Settings,
    timeout: float,
) -> Permutation:
    deadline = time.monotonic() + timeout
    shown = layout if isinstance(layout, str) else layout.digest().hex()
    digest = hashlib.sha256(f"{topology.digest} {shown}".encode()).hexdigest()
    label = f"{digest} {topology.where} with this layout"
    world = overlay.join(replace(spec, placement=label), timeout, settings=settings)

    def left() -> float:
        return max(0.0, deadline - time.monotonic())

    try:
        me = world.identity
        mine = json.dumps([me.host_index, me.local_rank, *spec.host.names])
        told = world.gather(mine.encode(), tag="hosts", timeout=left())
        answer = None if told is None else _answer(topology, layout, list(map(json.loads, told)))
        text = world.broadcast(answer, tag="order", timeout=left()).decode()
    except BaseException as error:
        world.abandon(f"{type(error).__name__}: {error}")
        raise
    world.leave(min(_LEAVING, left()))
    kind, _, body = text.partition(" ")
    if kind != "order":
        raise getattr(errors, kind)(body)
    return read_permutation(body, topology.where)


def _answer(topology: Topology, layout: str | Layout, told: list[list[Any]]) -> bytes:
    """At rank 0: `order` and the permutation, or the class of an error and its text."""
    try:
        return f"order {_order(topology, layout, told).text()}".encode()
    except CommkitError as error:
        return f"{type(error).__name__} {error}".encode("utf-8", "replace")


def _order(topology: Topology, layout: str | Layout, told: list[list[Any]]) -> Permutation:
    """told[launcher's rank] is (number of its host, local rank, names of its host)."""
    from commkit import placing  # at rank 0 only: much to import

    fabric = topology.fabric
    if isinstance(fabric, str):
        fabric = readers.read(fabric)
    each = sum(row[0] == told[0][0] for row in told)
    for rank, (host, local, *_) in enumerate(told):
        first = told[rank - rank % each]
        if (host, local) != (first[0], rank % each) or len(told) % each:
            raise LaunchError(
                f"rank {rank} is local rank {local} of host {told[rank][2]}, not local rank "
                f"{rank % each} of host {first[2]}: {topology.where} moves whole hosts, which "
                f"needs {each} ranks in a row on each; start the job with block distribution"
            )
    names = [_name_in(fabric, told[rank][2:]) for rank in range(0, len(told), each)]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise LaunchError(
            f"{topology.where}: two hosts of this job are called {twice}; set COMMKIT_HOST_NAME "
            "to each one's own name there"
        )
    placed = placing.placed(placing.Wish(tuple(names), layout, each), fabric)
    for note in placed.notes:
        log.info("%s: %s", topology.where, note)
    return permutation(placed.plan.host_of, names, each)


def _name_in(fabric: Fabric, names: Sequence[str]) -> str:
    """A host's name in the fabric; its first name where the fabric does not know it."""
    for name in names:
        if name in fabric.host_index:
            return fabric.hosts[fabric.host_index[name]].name
    for name in names:
        short = name.partition(".")[0]
        if short in fabric.host_index:
            return fabric.hosts[fabric.host_index[short]].name
    return names[0]
