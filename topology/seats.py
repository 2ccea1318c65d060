"""The hosts of a job as places to sit: which groups of switches they are in, and what leads out.

Plain integers derived from a Fabric, which is what placement works on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from commkit.errors import NoTopology, TopologyError, UsageError
from commkit.topology.fabric import Fabric, Level

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Layer:
    """Groups of hosts at one level of switches.

    group      host -> group, by first appearance; each lies in one group of the next layer
    uplinks    group -> equal links upwards, over which a hash spreads flows; None: unknown
    rate       bytes/s of one of them; None: unknown
    sharing    rails whose flows share these uplinks: 1 where every rail has switches of its own
    price      what a byte that leaves costs in the objective: the oversubscription, at least 1
    name       for reports
    """

    group: tuple[int, ...]
    uplinks: tuple[int, ...] | None = None
    rate: float | None = None
    sharing: int = 1
    price: float = 1.0
    name: str = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        found = [0] * (max(self.group, default=-1) + 1)
        for g in self.group:
            found[g] += 1
        return tuple(found)


@dataclass(frozen=True)
class Seats:
    """Layers nearest first; none where all hosts are under one switch.  nic: bytes/s of a NIC."""

    hosts: int
    layers: tuple[Layer, ...]
    nic: float | None = None

    def __post_init__(self) -> None:
        below: Layer | None = None
        for layer in self.layers:
            if len(layer.group) != self.hosts:
                raise UsageError(
                    f"layer {layer.name or '?'}: {len(layer.group)} hosts: expected {self.hosts}"
                )
            if layer.uplinks is not None and len(layer.uplinks) <= max(layer.group, default=-1):
                raise UsageError(f"layer {layer.name or '?'}: expected uplinks of every group")
            if below is not None:
                parent: dict[int, int] = {}
                for g, up in zip(below.group, layer.group, strict=True):
                    if parent.setdefault(g, up) != up:
                        raise UsageError(
                            f"group {g} of a layer is in two groups of the next, {parent[g]} and "
                            f"{up}: expected one"
                        )
            below = layer

    @property
    def known_links(self) -> bool:
        """Whether the time of hashed flows can be estimated."""
        return self.nic is not None and all(
            layer.uplinks is not None and layer.rate is not None and min(layer.uplinks) > 0
            for layer in self.layers
        )


def seats_of(
    fabric: Fabric,
    *,
    uplinks: int | None = None,
    uplink_gbps: float | None = None,
    nic_gbps: float | None = None,
    oversubscription: Sequence[float] = (),
) -> Seats:
    """The seats of the hosts of `fabric` (a job's: Fabric.select), in its order.

    The keyword arguments stand in for what the fabric does not say: uplinks of every leaf group
    and rail, their speed, the NICs' speed, and the oversubscription of each layer, nearest first
    (its hosts' bandwidth over that of its uplinks).  A host without a known switch is alone in a
    group of its own.

    Raises NoTopology if no host has a known switch, TopologyError if two hosts have no network in
    common.
    """
    hosts = len(fabric.hosts)
    if hosts and len(fabric.unplaced) == hosts:
        raise NoTopology(
            "no host of the job has a place in the topology: expected switches or blocks that "
            f"list {fabric.hosts[0].name} and others; check the host names"
        )
    parts = fabric.components()
    placed = [i for i in range(hosts) if parts[i] >= 0]
    for i in placed:
        if parts[i] != parts[placed[0]]:
            raise TopologyError(
                f"hosts {fabric.hosts[placed[0]].name} and {fabric.hosts[i].name} have no network "
                "in common: expected one fabric for a job; leave out the hosts of the others"
            )
    nic = next((n.gbps for h in fabric.hosts for n in h.nics if n.gbps is not None), nic_gbps)
    rails = fabric.rails
    layers: list[Layer] = []
    levels = fabric.levels()
    sample = placed[0] if placed else 0
    for k, level in enumerate(levels):
        group = _renumber(level.group)
        count = max(group) + 1
        if count == 1 or (layers and len(set(layers[-1].group)) == count):
            continue
        own = fabric.levels(rails[0])[k] if rails else level
        sharing = (
            sum(_switches(fabric.levels(r)[k], sample) == _switches(own, sample) for r in rails)
            if rails
            else max(1, len(fabric.hosts[sample].nics))
        )
        first = {g: i for i, g in reversed(list(enumerate(group)))}
        cables = [_at(own.uplinks, own.group[first[g]]) for g in range(count)]
        gbps = [_at(own.uplink_gbps, own.group[first[g]]) for g in range(count)]
        known = [c for c in cables if c]
        stand_in = uplinks if not layers else None
        number = tuple(c or stand_in or 0 for c in cables) if known or stand_in else None
        speed = next((s / c for s, c in zip(gbps, cables, strict=True) if s and c), None)
        speed = speed or (uplink_gbps if stand_in else None)
        price = oversubscription[k] if k < len(oversubscription) else None
        if price is None:
            price = _oversubscription(level, nic, len(rails) or sharing)
        layers.append(
            Layer(
                group,
                number,
                None if speed is None else speed * 1e9 / 8,
                sharing,
                max(1.0, price or 1.0),
                _kind(fabric, level) or f"layer {k}",
            )
        )
    return Seats(hosts, tuple(layers), None if nic is None else nic * 1e9 / 8)


def _renumber(group: Sequence[int]) -> tuple[int, ...]:
    """Groups by first appearance; each -1 a group of its own."""
    numbers: dict[int, int] = {}
    made = []
    for i, g in enumerate(group):
        made.append(numbers.setdefault(g if g >= 0 else -1 - i, len(numbers)))
    return tuple(made)


def _switches(level: Level, host: int) -> tuple[int, ...]:
    return level.switches[level.group[host]] if level.group[host] >= 0 else ()


def _at(values: Sequence[_Number | None], index: int) -> _Number | None:
    return values[index] if index >= 0 else None


def _kind(fabric: Fabric, level: Level) -> str | None:
    return next((fabric.switches[s].kind for some in level.switches for s in some), None)


def _oversubscription(level: Level, nic: float | None, rails: int) -> float | None:
    """NICs of the job's hosts in a group over the group's uplinks, where that is largest."""
    if nic is None:
        return None
    hosts = [0] * level.groups
    for g in level.group:
        if g >= 0:
            hosts[g] += 1
    ratios = [n * rails * nic / up for n, up in zip(hosts, level.uplink_gbps, strict=True) if up]
    return max(ratios, default=None)
