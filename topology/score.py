"""What a placement costs: bytes over each layer, the fullest group, expected seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from commkit.errors import UsageError
from commkit.topology.bound import LowerBounds
from commkit.topology.collisions import expected_time
from commkit.topology.seats import Seats
from commkit.topology.traffic import Demand, HostFamily

#: Objective -> what its terms weigh: bytes, fullest group, time of hashed flows.
OBJECTIVES = {"time": (1.0, 1.0, 5.0), "bytes": (1.0, 1.0, 0.0)}

#: A family whose edges carry so few different amounts is counted amount by amount.
_AMOUNTS = 4


@dataclass(frozen=True)
class Score:
    """crossing  bytes a step that leave their group, for each layer, nearest first
    fullest      bytes a step that the group with most sends out, for each layer
    by_family    (family, crossing of the nearest layer)
    hashed       expected seconds a step on the slowest of NIC and uplinks, families one after the
                 other, flows hashed evenly; None where links are unknown
    planned      the same if flows are spread over the uplinks as evenly as can be
    """

    crossing: tuple[float, ...]
    fullest: tuple[float, ...]
    by_family: tuple[tuple[str, float], ...]
    hashed: float | None
    planned: float | None


@dataclass(frozen=True)
class Least:
    """Lower bounds of the same, whatever the placement; nic: seconds that the NICs need."""

    crossing: tuple[float, ...]
    fullest: tuple[float, ...]
    nic: float | None


class Scorer:
    """Scores placements of one demand on the same seats; host_of[logical host] is a seat."""

    def __init__(
        self, demand: Demand, seats: Seats, queue_pairs: int = 1, objective: str = "time"
    ) -> None:
        if objective not in OBJECTIVES:
            raise UsageError(f"objective {objective!r}: expected {' or '.join(OBJECTIVES)}")
        self._weights = OBJECTIVES[objective]
        self.demand, self.seats, self.queue_pairs = demand, seats, queue_pairs
        self._families = [_Family(family) for family in demand.families]
        bounds = LowerBounds(demand)
        each = [bounds.of(layer.sizes) for layer in seats.layers]
        nic = None
        if seats.nic is not None:
            nic = sum(f.busiest_nic(demand.hosts) for f in self._families) / seats.nic
        self.least = Least(tuple(b.total for b in each), tuple(b.fullest for b in each), nic)

    def crossing(self, host_of: Sequence[int]) -> float:
        """Price-weighted bytes that leave their groups: the cheap part of `goal`."""
        total = 0.0
        for layer in self.seats.layers:
            at = [layer.group[seat] for seat in host_of]
            total += layer.price * sum(f.crossing(at) for f in self._families)
        return total

    def score(self, host_of: Sequence[int]) -> Score:
        seats = self.seats
        timed = seats.known_links
        crossing, fullest = [], []
        by_family: list[float] = [0.0] * len(self._families)
        # family -> (flows, bytes of one, uplinks, bytes/s) of every group of uplinks
        loads: list[list[tuple[int, float, int, float]]] = [[] for _ in self._families]
        for depth, layer in enumerate(seats.layers):
            at = [layer.group[seat] for seat in host_of]
            groups = max(layer.group, default=-1) + 1
            egress = [0.0] * groups
            for k, family in enumerate(self._families):
                out, into = family.flows(at, groups)
                for g, (_, amount, _) in enumerate(out):
                    egress[g] += amount
                if depth == 0:
                    by_family[k] = sum(amount for _, amount, _ in out)
                if timed and layer.uplinks is not None and layer.rate is not None:
                    for side in (out, into):
                        for g, (count, amount, squares) in enumerate(side):
                            if count:
                                load = self._load(count, amount, squares, family, layer.sharing)
                                loads[k].append((*load, layer.uplinks[g], layer.rate))
            crossing.append(sum(egress))
            fullest.append(max(egress, default=0.0))
        hashed = planned = None
        if timed and seats.nic is not None:
            hashed = planned = 0.0
            for family, some in zip(self._families, loads, strict=True):
                nic = family.busiest_nic(self.demand.hosts) / seats.nic
                hashed += expected_time(
                    ((flows, links, each / rate) for flows, each, links, rate in some), nic
                )
                planned += max(
                    [nic, *(-(-flows // links) * each / rate for flows, each, links, rate in some)]
                )
        names = [family.name for family in self.demand.families]
        return Score(
            tuple(crossing),
            tuple(fullest),
            tuple(zip(names, by_family, strict=True)),
            hashed,
            planned,
        )

    def busiest(self, host_of: Sequence[int]) -> list[tuple[str, int, int | None]]:
        """(family, most flows that leave a leaf group by one rail's uplinks, those uplinks)."""
        found: list[tuple[str, int, int | None]] = []
        for layer in self.seats.layers[:1]:
            at = [layer.group[seat] for seat in host_of]
            groups = max(layer.group, default=-1) + 1
            for wanted, family in zip(self.demand.families, self._families, strict=True):
                out, _ = family.flows(at, groups)
                most, g = max(((count, g) for g, (count, _, _) in enumerate(out)), default=(0, 0))
                flows = most * min(layer.sharing, family.rails) * self.queue_pairs
                found.append((wanted.name, flows, layer.uplinks[g] if layer.uplinks else None))
        return found

    def _load(
        self, count: int, amount: float, squares: float, family: _Family, sharing: int
    ) -> tuple[int, float]:
        """(flows, bytes of one) on the uplinks that `sharing` rails share.

        Flows of different sizes count as fewer equal ones, with the same sum and squares.
        """
        rails = family.rails
        shared = min(sharing, rails)
        each = squares / amount / rails / self.queue_pairs
        flows = amount * amount / squares * shared * self.queue_pairs
        return max(1, round(flows)), each

    def goal(self, score: Score) -> float:
        """What placement minimises: bytes, fullest group and time, each over its lower bound."""
        bytes_, full, time = self._weights
        total = 0.0
        prices = [layer.price for layer in self.seats.layers]
        least = sum(p * b for p, b in zip(prices, self.least.crossing, strict=True))
        sent = sum(p * b for p, b in zip(prices, score.crossing, strict=True))
        total += bytes_ * _over(sent, least)
        if score.fullest:
            total += full * _over(score.fullest[0], self.least.fullest[0])
        if score.hashed is not None and self.least.nic:
            total += time * score.hashed / self.least.nic
        return total


def _over(value: float, least: float) -> float:
    """A ratio; where nothing need cross, whatever does counts in full."""
    return value / least if least > 0 else (0.0 if value <= 0 else 1.0 + value)


class _Family:
    """One family as lists that can be counted quickly."""

    def __init__(self, family: HostFamily) -> None:
        self.edges: list[tuple[int, int, float]] = []
        self.cliques: list[tuple[tuple[int, ...], float]] = []
        for group in family.groups:
            if family.pattern == "pairs" and len(group.hosts) > 2:
                self.cliques.append((group.hosts, group.edge_bytes))
            else:
                self.edges += group.each(family.pattern)
        self.rails = max((len(group.rails) for group in family.groups), default=1)
        #: Edges by what each carries, each pair once if both directions carry the same; None where
        #: there are too many amounts for that to be quicker.
        self.symmetric = _symmetric(self.edges)
        self.alike: dict[float, list[tuple[int, int]]] | None = None
        amounts = {amount for _, _, amount in self.edges}
        if len(amounts) <= _AMOUNTS and not self.cliques:
            self.alike = {amount: [] for amount in amounts}
            for a, b, amount in self.edges:
                if a < b or not self.symmetric:
                    self.alike[amount].append((a, b))
        self._nic: float | None = None

    def busiest_nic(self, hosts: int) -> float:
        """Bytes a step that leave the busiest host by one rail."""
        if self._nic is None:
            sent = [0.0] * hosts
            for a, _, amount in self.edges:
                sent[a] += amount
            for members, amount in self.cliques:
                for host in members:
                    sent[host] += amount * (len(members) - 1)
            self._nic = max(sent, default=0.0) / self.rails
        return self._nic

    def crossing(self, at: Sequence[int]) -> float:
        total = 0.0
        for a, b, amount in self.edges:
            if at[a] != at[b]:
                total += amount
        for members, amount in self.cliques:
            size = len(members)
            for inside in _count(members, at).values():
                total += amount * inside * (size - inside)
        return total

    def flows(
        self, at: Sequence[int], groups: int
    ) -> tuple[list[tuple[int, float, float]], list[tuple[int, float, float]]]:
        """For each group, out of it and into it: (flows, bytes, sum of squares of bytes)."""
        if self.alike is not None:
            return self._alike_flows(self.alike, at, groups)
        counts = ([0] * groups, [0] * groups)
        sums = ([0.0] * groups, [0.0] * groups)
        squares = ([0.0] * groups, [0.0] * groups)
        for a, b, amount in self.edges:
            source, target = at[a], at[b]
            if source != target:
                for side, g in ((0, source), (1, target)):
                    counts[side][g] += 1
                    sums[side][g] += amount
                    squares[side][g] += amount * amount
        for members, amount in self.cliques:
            size = len(members)
            inside = _count(members, at)
            if len(inside) > 1:
                for g, n in inside.items():
                    pairs = n * (size - n)
                    for side in (0, 1):
                        counts[side][g] += pairs
                        sums[side][g] += amount * pairs
                        squares[side][g] += amount * amount * pairs
        return (
            list(zip(counts[0], sums[0], squares[0], strict=True)),
            list(zip(counts[1], sums[1], squares[1], strict=True)),
        )

    def _alike_flows(
        self, alike: dict[float, list[tuple[int, int]]], at: Sequence[int], groups: int
    ) -> tuple[list[tuple[int, float, float]], list[tuple[int, float, float]]]:
        sides: tuple[list[list[int]], list[list[int]]] = ([], [])
        for pairs in alike.values():
            there, back = [0] * groups, [0] * groups
            for a, b in pairs:
                source, target = at[a], at[b]
                if source != target:
                    there[source] += 1
                    back[target] += 1
            if self.symmetric:
                there = back = [m + n for m, n in zip(there, back, strict=True)]
            sides[0].append(there)
            sides[1].append(back)
        out, into = (
            [
                (
                    sum(counts),
                    sum(n * each for n, each in zip(counts, alike, strict=True)),
                    sum(n * each * each for n, each in zip(counts, alike, strict=True)),
                )
                for counts in zip(*side, strict=True)
            ]
            for side in sides
        )
        return out, into


def _symmetric(edges: Sequence[tuple[int, int, float]]) -> bool:
    """Whether every edge has an opposite one that carries as much."""
    there = Counter((a, b, amount) for a, b, amount in edges)
    return all(there[b, a, amount] == times for (a, b, amount), times in there.items())


def _count(members: Sequence[int], at: Sequence[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for host in members:
        g = at[host]
        found[g] = found.get(g, 0) + 1
    return found
