"""The one canonical description of a fabric: hosts, their NICs, switches in layers, links.

Readers make it, nobody else parses.  What is not known is None (or an empty tuple), never a guess.
Everything is frozen, compares by value, and refers to hosts and switches by index, so that plans
can be made on plain integers: `levels()` is what the algorithms want.

A fabric is a graph, not a tree: a leaf has several spines, a host sits on several leaves (rails),
and several networks may have nothing to do with one another.  The tree that planning needs is
derived: at level k two hosts are in one group if switches of layers 0..k connect them.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from commkit.errors import TopologyError

_Number = TypeVar("_Number", int, float)

#: More layers of switches than any network has.  Slurm stops at 20.
MAX_LAYERS = 64


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator of a host."""

    name: str  #: as its tool says it: "GPU0"
    busid: str | None = None  #: PCI address, "0000:1b:00.0"
    numa: int | None = None
    cpus: str | None = None  #: "0-31,64-95", as the kernel writes lists
    model: str | None = None
    id: str | None = None  #: its UUID, "GPU-..."


@dataclass(frozen=True, slots=True)
class Nic:
    """A port of a network adapter, and the switch that it is plugged into.

    Without a name it stands for however many there are: the file told only where the host is.
    """

    name: str | None = None  #: "mlx5_0", "eth0"
    switch: int | None = None  #: index into Fabric.switches
    port: int | None = None  #: of the adapter; one adapter may be on two switches
    rail: int | None = None
    gbps: float | None = None  #: Gbit/s of the link
    busid: str | None = None
    numa: int | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """`devices` is None where the number of accelerators is unknown, () where there are none."""

    name: str
    nics: tuple[Nic, ...] = ()
    devices: tuple[Device, ...] | None = None
    #: The NVLink domain (rack-scale systems), nearer than any switch.
    domain: str | None = None
    #: The provider's or adapter's own name of the host: an instance id.
    id: str | None = None
    #: (device or NIC, device or NIC, how): "NV18", "PIX", "PXB", "PHB", "NODE", "SYS".
    paths: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Switch:
    """`layer` 0 is nearest to the hosts.  A block of hosts without known wiring is one, too."""

    name: str
    layer: int = 0
    kind: str | None = None  #: the file's word for its layer: "leaf", "block", "subblock"
    id: str | None = None  #: GUID, chassis id
    link_speed: int | None = None  #: Slurm's LinkSpeed, a number without a unit, as it is written


@dataclass(frozen=True, slots=True)
class Link:
    """Parallel cables between two switches; `a` is the one of the lower layer or lower index."""

    a: int
    b: int
    count: int | None = None  #: how many cables
    gbps: float | None = None  #: Gbit/s of one of them, each way


@dataclass(frozen=True, slots=True)
class Level:
    """The hosts in groups that switches of layers 0..`layer` connect.

    Groups are numbered by first appearance in host order.  Each group of one level lies within one
    group of the next level.
    """

    layer: int
    #: host -> group, -1 for a host without a known switch.
    group: tuple[int, ...]
    #: group -> the switches of its highest layer (<= `layer`).
    switches: tuple[tuple[int, ...], ...]
    #: group -> cables to higher layers, and their Gbit/s altogether; None where one is unknown,
    #: 0 where there are none.
    uplinks: tuple[int | None, ...]
    uplink_gbps: tuple[float | None, ...]

    @property
    def groups(self) -> int:
        return len(self.switches)


@dataclass(frozen=True)
class Fabric:
    """Raises TopologyError for names that occur twice and for indices that lead nowhere."""

    hosts: tuple[Host, ...] = ()
    switches: tuple[Switch, ...] = ()
    links: tuple[Link, ...] = ()
    #: Slurm's BlockSizes, smallest first.
    block_sizes: tuple[int, ...] = ()
    #: What a reader had to say about its file: one sentence each.
    notes: tuple[str, ...] = ()
    #: Hosts that no switch joins are connected all the same, in ways that the file does not show:
    #: blocks and providers' places say who is near, not who is cut off.
    joined: bool = False

    def __post_init__(self) -> None:
        for what, names in (
            ("host", [host.name for host in self.hosts]),
            ("switch", [switch.name for switch in self.switches]),
        ):
            if len(set(names)) != len(names):
                name = next(name for name, times in Counter(names).items() if times > 1)
                raise TopologyError(f"{what} {name!r} occurs twice: expected every name once")
            if "" in names:
                raise TopologyError(f"a {what} without a name: expected a name")
        count = len(self.switches)
        for host in self.hosts:
            for nic in host.nics:
                if nic.switch is not None and not 0 <= nic.switch < count:
                    raise TopologyError(f"host {host.name!r}: no switch of index {nic.switch}")
                _positive(nic.gbps, f"host {host.name!r}, NIC {nic.name or '?'}: gbps")
        for switch in self.switches:
            if switch.layer < 0:
                raise TopologyError(f"switch {switch.name!r}: layer {switch.layer} is below 0")
            if switch.layer >= MAX_LAYERS:
                raise TopologyError(
                    f"switch {switch.name!r} is in layer {switch.layer}, nearest first from 0: "
                    f"expected {MAX_LAYERS} layers at most"
                )
        for link in self.links:
            if not (0 <= link.a < count and 0 <= link.b < count) or link.a == link.b:
                raise TopologyError(f"a link from switch {link.a} to {link.b}: expected two others")
            where = f"link {self.switches[link.a].name} - {self.switches[link.b].name}"
            _positive(link.gbps, f"{where}: gbps")
            _positive(link.count, f"{where}: count")
        object.__setattr__(self, "links", self._canonical_links())

    def _canonical_links(self) -> tuple[Link, ...]:
        """Sorted, lower layer first, one Link for all cables of one speed between two switches."""
        layers = [switch.layer for switch in self.switches]
        found: dict[tuple[int, int, float], Link] = {}
        for link in self.links:
            a, b = sorted((link.a, link.b), key=lambda s: (layers[s], s))
            key = a, b, link.gbps or 0.0
            seen = found.get(key)
            count = link.count if seen is None else _sum(seen.count, link.count)
            found[key] = Link(a, b, count, link.gbps)
        return tuple(found[key] for key in sorted(found))

    # --- Looking things up -------------------------------------------------------------------

    @functools.cached_property
    def host_index(self) -> dict[str, int]:
        """Name -> index; ids too, where they are no host's name."""
        found = {host.id: i for i, host in enumerate(self.hosts) if host.id is not None}
        return {**found, **{host.name: i for i, host in enumerate(self.hosts)}}

    @functools.cached_property
    def switch_index(self) -> dict[str, int]:
        return {switch.name: i for i, switch in enumerate(self.switches)}

    @functools.cached_property
    def rails(self) -> tuple[int, ...]:
        """Rails that NICs name, ascending."""
        return tuple(sorted({n.rail for h in self.hosts for n in h.nics if n.rail is not None}))

    @functools.cached_property
    def depth(self) -> int:
        """Number of switch layers."""
        return max((switch.layer for switch in self.switches), default=-1) + 1

    @functools.cached_property
    def attached(self) -> tuple[tuple[int, ...], ...]:
        """Switch -> the hosts that are plugged into it, ascending."""
        found: list[dict[int, None]] = [{} for _ in self.switches]
        for i, host in enumerate(self.hosts):
            for nic in host.nics:
                if nic.switch is not None:
                    found[nic.switch][i] = None
        return tuple(tuple(hosts) for hosts in found)

    @functools.cached_property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """Switch -> the switches it has links with, ascending."""
        found: list[set[int]] = [set() for _ in self.switches]
        for link in self.links:
            found[link.a].add(link.b)
            found[link.b].add(link.a)
        return tuple(tuple(sorted(others)) for others in found)

    @property
    def roots(self) -> tuple[int, ...]:
        """Switches with no link to a higher layer, in file order."""
        layers = [switch.layer for switch in self.switches]
        return tuple(
            i
            for i, others in enumerate(self.neighbours)
            if all(layers[j] <= layers[i] for j in others)
        )

    @property
    def unplaced(self) -> tuple[int, ...]:
        """Hosts without a known switch.  They are nobody's neighbours, not even each other's."""
        return tuple(
            i for i, host in enumerate(self.hosts) if all(n.switch is None for n in host.nics)
        )

    # --- What algorithms want ----------------------------------------------------------------

    def levels(self, rail: int | None = None) -> tuple[Level, ...]:
        """One Level for each switch layer, nearest first; the last one tells separate fabrics.

        With `rail` only NICs of that rail count: a rail-optimised fabric, whose hosts' NICs go to
        different leaves, has one group of leaves at level 0 over all rails, and one leaf for each
        rail by itself.  Cost: O((hosts + links) * depth).
        """
        cached: dict[int | None, tuple[Level, ...]] = self.__dict__.setdefault("_levels", {})
        if rail not in cached:
            cached[rail] = self._levels_of(rail)
        return cached[rail]

    def components(self) -> tuple[int, ...]:
        """Host -> number of its fabric, -1 for a host without a known switch."""
        if not self.switches:
            return (-1,) * len(self.hosts)
        top = self.levels()[-1].group
        return tuple(min(group, 0) for group in top) if self.joined else top

    def domains(self) -> tuple[int, ...]:
        """Host -> number of its NVLink domain by first appearance, -1 for none."""
        numbers: dict[str, int] = {}
        return tuple(
            -1 if host.domain is None else numbers.setdefault(host.domain, len(numbers))
            for host in self.hosts
        )

    def distance(self, a: int, b: int, rail: int | None = None) -> int | None:
        """The level at which two hosts meet: 0 under one leaf.  None: nothing connects them.

        In a `joined` fabric hosts that no switch joins meet one level above the highest.
        """
        levels = self.levels(rail)
        for level in levels:
            if level.group[a] >= 0 and level.group[a] == level.group[b]:
                return level.layer
        placed = levels and levels[-1].group[a] >= 0 and levels[-1].group[b] >= 0
        return self.depth if placed and self.joined else None

    def meeting(self, a: int, b: int, rail: int | None = None) -> tuple[int, ...]:
        """The switches where the shortest ways between two hosts turn round; () if there are none.

        In a tree that is the lowest common ancestor.
        """
        at = self.distance(a, b, rail)
        if at is None or at == self.depth:
            return ()
        level = self.levels(rail)[at]
        top = [s for s in level.switches[level.group[a]] if self.switches[s].layer == at]
        common = self._above(a, at, rail) & self._above(b, at, rail)
        return tuple(s for s in top if s in common) or tuple(top)

    def order(self) -> tuple[int, ...]:
        """Hosts as a walk through the levels meets them: neighbours together, the unplaced last."""
        levels = self.levels()[::-1]
        first: list[dict[int, int]] = [{} for _ in levels]
        for i in range(len(self.hosts)):
            for seen, level in zip(first, levels, strict=True):
                seen.setdefault(level.group[i], i)

        def key(i: int) -> tuple[bool, tuple[int, ...], int]:
            groups = [level.group[i] for level in levels]
            placed = not groups or groups[-1] >= 0
            walk = tuple(seen[g] for seen, g in zip(first, groups, strict=True)) if placed else ()
            return not placed, walk, i

        return tuple(sorted(range(len(self.hosts)), key=key))

    def select(self, names: Iterable[str]) -> Fabric:
        """The fabric of a job: these hosts in this order, all switches.

        A host that is not in this fabric becomes one without a known switch; `unplaced` lists it,
        and a note says so.  Raises TopologyError for a host named twice.
        """
        chosen: list[Host] = []
        taken: set[int] = set()
        for name in names:
            i = self.host_index.get(name)
            if i is not None and i in taken:
                raise TopologyError(f"host {name!r} is named twice: expected every host once")
            if i is not None:
                taken.add(i)
            chosen.append(Host(name) if i is None else self.hosts[i])
        made = replace(self, hosts=tuple(chosen))
        lost = [made.hosts[i].name for i in made.unplaced]
        if not lost:
            return made
        some = ", ".join(lost[:8]) + (", ..." if len(lost) > 8 else "")
        note = f"{len(lost)} of {len(chosen)} hosts have no place in the topology: {some}"
        return replace(made, notes=(*made.notes, note))

    # --- Inside ------------------------------------------------------------------------------

    def _above(self, host: int, top: int, rail: int | None) -> set[int]:
        """Switches that `host` reaches by going up only, to layer `top`."""
        layers = [switch.layer for switch in self.switches]
        todo = [n.switch for n in self.hosts[host].nics if rail is None or n.rail == rail]
        found = {s for s in todo if s is not None}
        stack = list(found)
        while stack:
            here = stack.pop()
            for other in self.neighbours[here]:
                if layers[here] < layers[other] <= top and other not in found:
                    found.add(other)
                    stack.append(other)
        return found

    def _levels_of(self, rail: int | None) -> tuple[Level, ...]:
        joined = _Sets(len(self.switches))
        layers = [switch.layer for switch in self.switches]
        anchors: list[int] = []
        pairs = [(max(layers[link.a], layers[link.b]), link.a, link.b) for link in self.links]
        for host in self.hosts:
            mine = [
                nic.switch
                for nic in host.nics
                if nic.switch is not None and (rail is None or nic.rail == rail)
            ]
            mine.sort(key=lambda s: layers[s])
            anchors.append(mine[0] if mine else -1)
            pairs += [(layers[s], mine[0], s) for s in mine[1:] if s != mine[0]]
        pairs.sort()
        made: list[Level] = []
        done = 0
        for layer in range(self.depth):
            while done < len(pairs) and pairs[done][0] <= layer:
                joined.union(pairs[done][1], pairs[done][2])
                done += 1
            made.append(self._level(layer, anchors, layers, joined))
        return tuple(made)

    def _level(self, layer: int, anchors: list[int], layers: list[int], joined: _Sets) -> Level:
        numbers: dict[int, int] = {}
        group = [
            -1
            if anchor < 0 or layers[anchor] > layer
            else numbers.setdefault(joined.find(anchor), len(numbers))
            for anchor in anchors
        ]
        members: list[list[int]] = [[] for _ in numbers]
        for s, own in enumerate(layers):
            if own <= layer and (number := numbers.get(joined.find(s))) is not None:
                members[number].append(s)
        tops = [max(layers[s] for s in some) for some in members]
        cables: list[int | None] = [0] * len(members)
        gbps: list[float | None] = [0.0] * len(members)
        for link in self.links:
            low, high = sorted((link.a, link.b), key=lambda s: layers[s])
            if not layers[low] <= layer < layers[high]:
                continue
            number = numbers.get(joined.find(low))
            if number is None:
                continue
            cables[number] = _sum(cables[number], link.count)
            both = None if link.gbps is None or link.count is None else link.gbps * link.count
            gbps[number] = _sum(gbps[number], both)
        return Level(
            layer,
            tuple(group),
            tuple(
                tuple(s for s in some if layers[s] == top)
                for some, top in zip(members, tops, strict=True)
            ),
            tuple(cables),
            tuple(gbps),
        )


class _Sets:
    """Disjoint sets of 0..count-1."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def find(self, x: int) -> int:
        parent = self.parent
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    def union(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[max(a, b)] = min(a, b)


def _sum(total: _Number | None, more: _Number | None) -> _Number | None:
    return None if total is None or more is None else total + more


def _positive(value: float | None, where: str) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise TopologyError(f"{where} is {value}: expected a number above 0, or nothing if unknown")


def leaf_spine(
    per_leaf: int | Sequence[int],
    leaves: int | None = None,
    spines: int = 1,
    *,
    rails: int = 1,
    rail_optimised: bool = True,
    rail_only: bool = False,
    uplinks: int = 1,
    leaves_per_pod: int | None = None,
    cores: int = 0,
    core_links: int = 1,
    nic_gbps: float | None = None,
    uplink_gbps: float | None = None,
    core_gbps: float | None = None,
    devices: int | None = None,
    host_name: str = "h{0:05d}",
) -> Fabric:
    """A leaf-spine or, with `cores`, a three-layer fabric, for tests, benchmarks and what-ifs.

    per_leaf  hosts of a leaf, or of each leaf in turn; hosts are named by `host_name`
    leaves    number of leaves (of leaf groups, where several rails have leaves of their own)
    spines    spines of each pod; each leaf has `uplinks` cables to each of them
    rails     NICs of a host.  rail_optimised: rail r goes to the r-th leaf of its group, else all
              go to one leaf.  rail_only: each rail also has spines (and cores) of its own, so that
              rails meet only inside hosts
    leaves_per_pod, cores   pods of so many leaf groups (None: one pod); each spine has `core_links`
              cables to each core; without cores, pods are separate fabrics

    Speeds in Gbit/s of one cable.  Raises TopologyError for a size below 1.
    """
    sizes = (
        [per_leaf] * (1 if leaves is None else leaves) if isinstance(per_leaf, int) else per_leaf
    )
    if leaves is not None and len(sizes) != leaves:
        raise TopologyError(f"{len(sizes)} sizes for {leaves} leaves: expected one for each")
    for what, value in (("rails", rails), ("uplinks", uplinks), ("leaves", len(sizes))):
        if value < 1:
            raise TopologyError(f"{what}={value}: expected 1 or more")
    split = rails if rail_optimised or rail_only else 1
    planes = rails if rail_only else 1
    pod_of = [g // (leaves_per_pod or len(sizes)) for g in range(len(sizes))]
    switches: list[Switch] = []
    links: list[Link] = []

    def add(name: str, layer: int, kind: str) -> int:
        switches.append(Switch(name, layer, kind))
        return len(switches) - 1

    def plane(name: str, number: int) -> str:
        return f"{name}-rail{number}" if planes > 1 else name

    leaf = [
        [add(f"leaf{g}-rail{r}" if split > 1 else f"leaf{g}", 0, "leaf") for r in range(split)]
        for g in range(len(sizes))
    ]
    pods = max(pod_of) + 1
    spine = [
        [
            [
                add(plane(f"spine{p}.{s}" if pods > 1 else f"spine{s}", x), 1, "spine")
                for s in range(spines)
            ]
            for x in range(planes)
        ]
        for p in range(pods)
    ]
    core = [[add(plane(f"core{c}", x), 2, "core") for c in range(cores)] for x in range(planes)]
    for g, of_rail in enumerate(leaf):
        for r, one in enumerate(of_rail):
            for s in spine[pod_of[g]][r if planes > 1 else 0]:
                links.append(Link(one, s, uplinks, uplink_gbps))
    for of_plane in spine:
        for x, some in enumerate(of_plane):
            links += [Link(s, c, core_links, core_gbps) for s in some for c in core[x]]
    gpus = None if devices is None else tuple(Device(f"GPU{d}") for d in range(devices))
    hosts: list[Host] = []
    for g, size in enumerate(sizes):
        # Hosts of one leaf group are wired alike: they share their NICs.
        nics = tuple(
            Nic(f"mlx5_{r}", leaf[g][r if split > 1 else 0], rail=r, gbps=nic_gbps)
            for r in range(rails)
        )
        hosts += [Host(host_name.format(len(hosts) + i), nics, gpus) for i in range(size)]
    return Fabric(tuple(hosts), tuple(switches), tuple(links))
