"""Workers as a framework hands them out: ranks that ignore where hosts and rails are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from commkit.topology.fabric import Host
from commkit.topology.inside import nearest_nics


def by_host(workers: Sequence[tuple[Hashable, int]]) -> list[int]:
    """Order of the workers, given as (host, GPU index), in which each host's are together.

    Hosts come as they first appear, the workers of one by GPU index.
    """
    first: dict[Hashable, int] = {}
    for place, (host, _) in enumerate(workers):
        first.setdefault(host, place)
    return sorted(range(len(workers)), key=lambda w: (first[workers[w][0]], workers[w][1], w))


def crossing(workers: Sequence[tuple[Hashable, int]], size: int) -> tuple[int, int]:
    """(groups of `size` consecutive ranks that are not on one host, groups)."""
    groups = [workers[i : i + size] for i in range(0, len(workers), size)]
    return sum(len({host for host, _ in group}) > 1 for group in groups), len(groups)


def rails_of(host: Host) -> list[int | None]:
    """For each accelerator the rail of the NIC nearest to it; [] where no rail is known."""
    rail = {nic.name: nic.rail for nic in host.nics if nic.name is not None}
    if all(number is None for number in rail.values()):
        return []
    near = nearest_nics(host)
    return [rail.get(near.get(device.name, "")) for device in host.devices or ()]


@dataclass(frozen=True)
class Mismatch:
    """A local rank whose NIC is on another rail than on most hosts."""

    host: str
    local_rank: int
    rail: Hashable
    expected: Hashable

    def __str__(self) -> str:
        return (
            f"host {self.host}: local rank {self.local_rank} uses rail {self.rail}, most hosts "
            f"use rail {self.expected}: rings between them cross rails"
        )


def rail_mismatches(rails: Mapping[str, Sequence[Hashable]]) -> list[Mismatch]:
    """rails[host][local rank] is the rail of the NIC that this rank sends by.

    Local rank i is expected on the same rail everywhere; the commonest counts as right, of equally
    common ones the one that came first.
    """
    found: list[Mismatch] = []
    longest = max((len(row) for row in rails.values()), default=0)
    for local in range(longest):
        votes = Counter(row[local] for row in rails.values() if local < len(row))
        expected = votes.most_common(1)[0][0]
        for host, row in rails.items():
            if local < len(row) and row[local] != expected:
                found.append(Mismatch(host, local, row[local], expected))
    place = {host: number for number, host in enumerate(rails)}
    return sorted(found, key=lambda m: (place[m.host], m.local_rank))


def differing(values: Mapping[str, Hashable], what: str) -> list[str]:
    """A line for each host whose value is not that of most, such as NCCL's crossNic."""
    if not values:
        return []
    expected = Counter(values.values()).most_common(1)[0][0]
    return [
        f"host {host}: {what} is {value}, on most hosts {expected}"
        for host, value in values.items()
        if value != expected
    ]
