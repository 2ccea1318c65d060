"""Makes a Fabric piece by piece, by names: what readers use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from commkit.errors import TopologyError
from commkit.topology.fabric import Device, Fabric, Host, Link, Nic, Switch

_DIGITS = re.compile(r"(\d+)")


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key: mlx5_2 before mlx5_10."""
    parts = _DIGITS.split(name)
    return tuple((0, int(p), p) if i % 2 else (1, 0, p) for i, p in enumerate(parts) if p)


@dataclass
class _Host:
    name: str
    nics: list[Nic] = field(default_factory=list)
    devices: tuple[Device, ...] | None = None
    domain: str | None = None
    id: str | None = None
    paths: tuple[tuple[str, str, str], ...] = ()


class Builder:
    """Names are looked up as they come; indices follow the order of first mention."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._switches: dict[str, Switch] = {}
        self._index: dict[str, int] = {}
        self._links: list[Link] = []
        self.notes: list[str] = []

    def switch(
        self,
        name: str,
        layer: int | None = None,
        kind: str | None = None,
        id: str | None = None,
        link_speed: int | None = None,
    ) -> int:
        """Index of the switch, which is made if it is new.  No layer: derived at the end."""
        if name not in self._index:
            self._index[name] = len(self._index)
            self._switches[name] = Switch(
                name, -1 if layer is None else layer, kind, id, link_speed
            )
        return self._index[name]

    def has_switch(self, name: str) -> bool:
        return name in self._index

    def host(
        self,
        name: str,
        id: str | None = None,
        domain: str | None = None,
        devices: Sequence[Device] | None = None,
        paths: Iterable[tuple[str, str, str]] = (),
    ) -> None:
        """Make the host, or add what was not known of it."""
        host = self._hosts.setdefault(name, _Host(name))
        host.id = host.id if id is None else id
        host.domain = host.domain if domain is None else domain
        host.devices = host.devices if devices is None else tuple(devices)
        host.paths = tuple(paths) or host.paths

    def attach(self, host: str, nic: Nic) -> None:
        """Add a NIC, unless the very same one is there."""
        self.host(host)
        if nic not in (nics := self._hosts[host].nics):
            nics.append(nic)

    def link(self, a: int, b: int, count: int | None = None, gbps: float | None = None) -> None:
        self._links.append(Link(a, b, count, gbps))

    def tree(self) -> Fabric:
        """Each link was given as (lower, upper): a switch's layer is its height.

        Raises TopologyError if there is no lowest one.
        """
        above: dict[int, list[int]] = {}
        missing = [0] * len(self._index)  # children not yet placed
        for low, high in {(link.a, link.b) for link in self._links}:
            above.setdefault(low, []).append(high)
            missing[high] += 1
        height = [0] * len(self._index)
        ready = [i for i, count in enumerate(missing) if count == 0]
        while ready:
            low = ready.pop()
            for high in above.get(low, ()):
                height[high] = max(height[high], height[low] + 1)
                missing[high] -= 1
                if missing[high] == 0:
                    ready.append(high)
        for name, i in self._index.items():
            if missing[i]:
                raise TopologyError(f"not a tree (cycle through {name})")
        return self._fabric(height)

    def graph(self) -> Fabric:
        """Links go both ways: a switch's layer is how far it is from the nearest host."""
        hosts = [0] * len(self._index)
        for host in self._hosts.values():
            for switch in {nic.switch for nic in host.nics if nic.switch is not None}:
                hosts[switch] += 1
        near: list[set[int]] = [set() for _ in hosts]
        for link in self._links:
            near[link.a].add(link.b)
            near[link.b].add(link.a)
        # A management server or two on a spine do not make it a leaf.
        leaves = [
            i
            for i, count in enumerate(hosts)
            if count
            and not (
                count <= 2 and len(near[i]) >= 2 and all(hosts[j] > 2 * count for j in near[i])
            )
        ]
        distance = [-1] * len(hosts)
        wave, at = leaves, 0
        while wave:
            for i in wave:
                distance[i] = at
            at += 1
            wave = sorted({j for i in wave for j in near[i] if distance[j] < 0})
        lost = [name for name, i in self._index.items() if distance[i] < 0]
        if lost and leaves:
            some = ", ".join(lost[:4]) + (", ..." if len(lost) > 4 else "")
            self.notes.append(f"{len(lost)} switches have no way to any host: {some}")
        return self._fabric([max(d, 0) for d in distance])

    def _fabric(self, derived: list[int]) -> Fabric:
        switches = [
            replace(s, layer=derived[i]) if s.layer < 0 else s
            for i, s in enumerate(self._switches.values())
        ]
        hosts = [
            Host(h.name, tuple(h.nics), h.devices, h.domain, h.id, h.paths)
            for h in self._hosts.values()
        ]
        return Fabric(tuple(hosts), tuple(switches), tuple(self._links), (), tuple(self.notes))


def number_rails(fabric: Fabric) -> Fabric:
    """Number the rails where the wiring shows them: no switch holds two kinds of NIC.

    That is, every nearest switch sees NICs of one name only, there are several names, and some
    switch has several hosts: rail r is the r-th of those names.  Otherwise the fabric is returned
    as it is.
    """
    names_at: dict[int, set[str]] = {}
    for host in fabric.hosts:
        for nic in host.nics:
            if nic.switch is None:
                continue
            if nic.name is None or nic.rail is not None or nic.port is not None:
                return fabric
            names_at.setdefault(nic.switch, set()).add(nic.name)
    names = sorted({name for some in names_at.values() for name in some}, key=natural)
    if len(names) < 2 or any(len(some) > 1 for some in names_at.values()):
        return fabric
    if all(len(hosts) < 2 for hosts in fabric.attached):
        return fabric
    rail = {name: number for number, name in enumerate(names)}
    hosts = tuple(
        replace(host, nics=tuple(replace(n, rail=rail.get(n.name or "")) for n in host.nics))
        for host in fabric.hosts
    )
    note = f"rails are numbered by NIC name, {names[0]} to {names[-1]}: no leaf has two kinds"
    return replace(fabric, hosts=hosts, notes=(*fabric.notes, note))


def with_insides(fabric: Fabric, insides: Iterable[Host]) -> Fabric:
    """What hosts know of themselves (node.read, NCCL's XML) added to what the network knows.

    Hosts are matched by name or id, NICs by name and port.  A host of which the network knows
    nothing is added without a place; what both know is kept as the network says it.
    """
    hosts = list(fabric.hosts)
    index = dict(fabric.host_index)
    for inside in insides:
        at = index.get(inside.name)
        if at is None:
            index[inside.name] = len(hosts)
            hosts.append(replace(inside, nics=tuple(replace(n, switch=None) for n in inside.nics)))
            continue
        host = hosts[at]
        own = {(nic.name, nic.port): nic for nic in inside.nics}
        nics: list[Nic] = []
        for nic in host.nics:
            same = None
            if nic.name is not None:
                # Where one port is in use, one side may not count the ports.
                alike = [key for key in own if key[0] == nic.name]
                exact = (nic.name, nic.port)
                if exact in own or len(alike) == 1:
                    same = own.pop(exact if exact in own else alike[0])
            nics.append(nic if same is None else _known_of_both(nic, same))
        nics += [replace(nic, switch=None) for nic in own.values()]
        hosts[at] = replace(
            host,
            nics=tuple(nics),
            devices=inside.devices if inside.devices is not None else host.devices,
            domain=host.domain if host.domain is not None else inside.domain,
            id=host.id if host.id is not None else inside.id,
            paths=inside.paths or host.paths,
        )
    return replace(fabric, hosts=tuple(hosts))


def _known_of_both(outer: Nic, inner: Nic) -> Nic:
    return Nic(
        outer.name,
        outer.switch,
        outer.port,
        outer.rail if outer.rail is not None else inner.rail,
        outer.gbps if outer.gbps is not None else inner.gbps,
        inner.busid if inner.busid is not None else outer.busid,
        inner.numa if inner.numa is not None else outer.numa,
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a provider says that a host is: names of ever larger places, nearest first.

    None: unknown at that level.  `kinds` are the provider's words for the levels.
    """

    host: str
    names: tuple[str | None, ...]
    kinds: tuple[str | None, ...] = ()
    id: str | None = None
    domain: str | None = None


def from_places(
    places: Sequence[Place], *, fixed: bool = False, notes: Iterable[str] = ()
) -> Fabric:
    """Places are identified by their names from the outermost one inwards.

    Two racks called r1 in two zones are two places, named zone-a/r1 and zone-b/r1 then.  With
    `fixed` the n-th name is layer n everywhere (node labels), otherwise layers follow the depth.
    """
    build = Builder()
    build.notes += notes
    full: dict[str, set[tuple[str, ...]]] = {}
    chains: list[list[tuple[tuple[str, ...], int]]] = []
    for place in places:
        known = [(name, level) for level, name in enumerate(place.names) if name is not None]
        chain = [
            (tuple(name for name, _ in reversed(known[i:])), level)
            for i, (_, level) in enumerate(known)
        ]
        for path, _ in chain:
            full.setdefault(path[-1], set()).add(path)
        chains.append(chain)
    used = {level for chain in chains for _, level in chain}
    layer_of = {level: layer for layer, level in enumerate(sorted(used))}
    linked: set[tuple[int, int]] = set()
    for place, chain in zip(places, chains, strict=True):
        build.host(place.host, id=place.id, domain=place.domain)
        below: int | None = None
        for path, level in chain:
            name = path[-1] if len(full[path[-1]]) == 1 else "/".join(path)
            kind = place.kinds[level] if level < len(place.kinds) else None
            here = build.switch(name, layer_of[level] if fixed else None, kind)
            if below is None:
                build.attach(place.host, Nic(switch=here))
            elif (below, here) not in linked:
                linked.add((below, here))
                build.link(below, here)
            below = here
    return replace(build.tree(), joined=True)
