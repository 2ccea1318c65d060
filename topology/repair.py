"""Hosts lost in mid-job: spare ones take their places, and few that survive move.

A host that moves loads its state again, so the first answer moves none: each lost logical host
goes to the spare seat where what it exchanges is cheapest.  Each further move is a swap that must
pay; `most_moves` limits how many surviving hosts move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from commkit.errors import UsageError
from commkit.topology.partition import Graph
from commkit.topology.placement import distances, graph_of
from commkit.topology.seats import Seats
from commkit.topology.traffic import Demand


@dataclass(frozen=True)
class Repair:
    """host_of as before, on the seats that are left; moved: surviving logical hosts that move."""

    host_of: tuple[int, ...]
    moved: tuple[int, ...]


def repair(
    demand: Demand,
    seats: Seats,
    host_of: Sequence[int],
    lost: Sequence[int],
    spares: Sequence[int],
    most_moves: int = 0,
) -> Repair:
    """New seats for the logical hosts on `lost` seats.

    seats    of all hosts, the old ones and the spares
    host_of  the placement so far: logical host -> seat
    lost     seats that are gone; spares: seats that are free; host_of uses no spare

    Raises UsageError if there are fewer spares than lost hosts, or a seat is unknown or used twice.
    """
    gone, free = set(lost), list(dict.fromkeys(spares))
    for what, some in (("placement", host_of), ("lost", lost), ("spares", spares)):
        for seat in some:
            if not 0 <= seat < seats.hosts:
                raise UsageError(f"{what}: seat {seat}: expected 0 to {seats.hosts - 1}")
    if len(set(host_of)) != len(host_of):
        raise UsageError("the placement so far has a seat twice")
    if gone & set(free) or set(free) & set(host_of):
        raise UsageError("spares: expected seats that are neither lost nor in use")
    homeless = [host for host, seat in enumerate(host_of) if seat in gone]
    if len(homeless) > len(free):
        raise UsageError(
            f"{len(homeless)} hosts are lost and {len(free)} are spare: expected as many; plan the "
            "job anew with a smaller layout"
        )
    graph, cost = graph_of(demand), distances(seats)
    leaf = seats.layers[0].group if seats.layers else (0,) * seats.hosts
    at: list[int | None] = [None if seat in gone else leaf[seat] for seat in host_of]
    made = list(host_of)
    while homeless:
        # The host that has most to say to those already placed goes first, where that is cheap.
        options = [
            (_cost(graph, cost, at, host, leaf[seat]), host, seat)
            for host in homeless
            for seat in _one_a_group(free, leaf)
        ]
        weight = {host: _placed(graph, at, host) for host in homeless}
        room = Counter(leaf[seat] for seat in free)  # neighbours may be lost, too
        ranked = [
            (-weight[host], price, -room[leaf[seat]], host, seat) for price, host, seat in options
        ]
        host, seat = min(ranked)[3:]
        made[host], at[host] = seat, leaf[seat]
        homeless.remove(host)
        free.remove(seat)
    moved = _swaps(graph, cost, at, made, leaf, set(host_of) - gone, most_moves)
    return Repair(tuple(made), tuple(sorted(moved)))


def _one_a_group(free: Sequence[int], leaf: Sequence[int]) -> list[int]:
    found: dict[int, int] = {}
    for seat in free:
        found.setdefault(leaf[seat], seat)
    return list(found.values())


def _near(graph: Graph, host: int) -> list[tuple[int, float]]:
    found = list(graph.neighbours[host])
    for q in graph.member_of[host]:
        members, weight = graph.cliques[q]
        found += [(j, weight) for j in members if j != host]
    return found


def _placed(graph: Graph, at: Sequence[int | None], host: int) -> float:
    return sum(weight for j, weight in _near(graph, host) if at[j] is not None)


def _cost(
    graph: Graph,
    cost: Sequence[Sequence[float]],
    at: Sequence[int | None],
    host: int,
    group: int,
    without: int = -1,
) -> float:
    total = 0.0
    for j, weight in _near(graph, host):
        there = at[j]
        if there is not None and j != without:
            total += weight * cost[group][there]
    return total


def _swaps(
    graph: Graph,
    cost: Sequence[Sequence[float]],
    at: list[int | None],
    made: list[int],
    leaf: Sequence[int],
    survivors: set[int],
    most_moves: int,
) -> set[int]:
    """Swap hosts while it pays, the best swap first; who of the survivors has moved."""
    moved: set[int] = set()
    old = {host: seat for host, seat in enumerate(made) if seat in survivors}
    while True:
        best: tuple[float, int, int] | None = None
        # A swap that helps has a host that was just placed, or one that already moved.
        fresh = [host for host in range(len(made)) if host not in old or host in moved]
        for i in fresh:
            here = at[i]
            assert here is not None
            for j in range(len(made)):
                there = at[j]
                if there is None or there == here or len(moved | ({j} & set(old))) > most_moves:
                    continue
                gain = _cost(graph, cost, at, i, here, j) - _cost(graph, cost, at, i, there, j)
                gain += _cost(graph, cost, at, j, there, i) - _cost(graph, cost, at, j, here, i)
                if gain > 1e-9 and (best is None or gain > best[0]):
                    best = (gain, i, j)
        if best is None:
            return {host for host in moved if made[host] != old[host]}
        _, i, j = best
        made[i], made[j] = made[j], made[i]
        at[i], at[j] = leaf[made[i]], leaf[made[j]]
        moved |= {i, j} & set(old)
