"""Which physical host plays which logical host, so that little crosses switches.

Whole hosts are permuted; what is inside a host stays there.  Several constructions are made and
improved, the best by the objective is kept, and the order that came in is one of them: the answer
is never worse than it.  No clock and no host name is looked at, so every host that plans comes to
the same answer, and renaming hosts renames the answer.

    walk    a walk through the grid of the job, cut into runs as long as the groups are large
    halves  groups and hosts halved again and again, the cheapest cut each time
    metis   METIS, if it is asked for and installed
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from commkit.errors import UsageError
from commkit.topology.grid import Grid, grids, walks
from commkit.topology.partition import Graph, Parts, bisect, cut_of
from commkit.topology.score import Least, Score, Scorer
from commkit.topology.seats import Seats
from commkit.topology.traffic import Demand

#: Contenders that are tried; more of them the smaller the job.
_EFFORT = 9_000
#: Neighbourhoods that are divided anew, one by one, in the end: so many, for so many edges.
_POLISH_LEAST, _POLISH_MOST, _POLISH_EDGES = 60, 160, 450_000
#: In small jobs the same neighbourhoods come up again: enough after so many in vain for each group.
_POLISH_VAIN = 4
#: What a part's cut beyond the fullest part's bound costs, over a byte that crosses.
_OVERLOAD = 2.0


@dataclass(frozen=True)
class Plan:
    """host_of[logical host] is the seat that plays it; `how` names the construction."""

    host_of: tuple[int, ...]
    how: str
    score: Score
    least: Least
    given: Score

    @property
    def gaps(self) -> tuple[float, ...]:
        """Bytes that cross over the lower bound, for each layer; 1 where both are 0."""
        return tuple(
            s / b if b > 0 else (1.0 if s <= 0 else math.inf)
            for s, b in zip(self.score.crossing, self.least.crossing, strict=True)
        )


def place(
    demand: Demand,
    seats: Seats,
    *,
    given: Sequence[int] | None = None,
    others: Sequence[tuple[str, Callable[[Demand, Seats], Sequence[int]]]] = (),
    queue_pairs: int = 1,
    objective: str = "time",
) -> Plan:
    """The best placement found of `demand` on `seats`.

    given    the placement so far, host_of; default: logical host i on seat i
    others   (name, function that places) of further contenders
    objective  "time": bytes, the fullest group and the time of hashed flows; "bytes": without the
             time, for fabrics that do not hash (planned paths, adaptive routing)

    Raises UsageError if the numbers of hosts differ or `given` is no permutation.
    """
    if demand.hosts != seats.hosts:
        raise UsageError(
            f"the layout has {demand.hosts} hosts, the allocation {seats.hosts}: expected equal "
            "numbers"
        )
    start = list(range(demand.hosts) if given is None else given)
    if sorted(start) != list(range(demand.hosts)):
        raise UsageError("the order so far is no permutation of the hosts")
    scorer = Scorer(demand, seats, queue_pairs, objective)
    given_score = scorer.score(start)
    best = (scorer.goal(given_score), "given", start, given_score)
    if demand.hosts > 1 and seats.layers:
        search = _Search(demand, seats, scorer)
        for how, host_of in search.candidates(start, others):
            score = scorer.score(host_of)
            goal = scorer.goal(score)
            if goal < best[0] * (1 - 1e-12):
                best = (goal, how, host_of, score)
        host_of = search.polished(best[2], best[0])
        score = scorer.score(host_of)
        if scorer.goal(score) < best[0] * (1 - 1e-12):
            best = (scorer.goal(score), f"{best[1]}, polished", host_of, score)
    _, how, host_of, score = best
    return Plan(tuple(host_of), how, score, scorer.least, given_score)


def graph_of(demand: Demand) -> Graph:
    """What hosts exchange, both directions and all families added up."""
    edges: list[tuple[int, int, float]] = []
    cliques: list[tuple[Sequence[int], float]] = []
    for family in demand.families:
        for group in family.groups:
            if family.pattern == "pairs":
                cliques.append((group.hosts, 2 * group.edge_bytes))
            else:
                edges += group.each(family.pattern)
    return Graph.of(demand.hosts, edges, cliques)


def distances(seats: Seats) -> list[list[float]]:
    """What a byte between two leaf groups costs: the prices of the layers at which they differ."""
    if not seats.layers:
        return [[0.0]]
    paths: dict[int, tuple[int, ...]] = {}
    for seat, g in enumerate(seats.layers[0].group):
        paths.setdefault(g, tuple(layer.group[seat] for layer in seats.layers))
    prices = [layer.price for layer in seats.layers]
    made = []
    for g in range(len(paths)):
        row = []
        for h in range(len(paths)):
            pairs = zip(prices, paths[g], paths[h], strict=True)
            row.append(sum(price for price, a, b in pairs if a != b))
        made.append(row)
    return made


class _Search:
    def __init__(self, demand: Demand, seats: Seats, scorer: Scorer) -> None:
        self.demand, self.seats, self.scorer = demand, seats, scorer
        self.graph = graph_of(demand)
        self.grid: Grid | None = next(iter(grids(demand)), None)
        self.starts = max(2, min(8, _EFFORT // max(1, demand.hosts)))
        #: leaf group -> its group in each layer, the highest first
        leaf = seats.layers[0]
        self.seats_of: list[list[int]] = [[] for _ in leaf.sizes]
        for seat, g in enumerate(leaf.group):
            self.seats_of[g].append(seat)
        self.above = [
            tuple(layer.group[some[0]] for layer in reversed(seats.layers))
            for some in self.seats_of
        ]
        self.distance = distances(seats)

    def candidates(
        self,
        start: Sequence[int],
        others: Sequence[tuple[str, Callable[[Demand, Seats], Sequence[int]]]],
    ) -> Iterator[tuple[str, list[int]]]:
        """(name, host_of), the improved ones and what they came from."""
        made: list[tuple[str, list[int]]] = [("given", list(start))]
        made += self._walks()
        for order in self._orders():
            made.append(("halves", self._halves(order)))
        made += [(name, list(place_it(self.demand, self.seats))) for name, place_it in others]
        for how, host_of in made:
            yield how, host_of
            yield f"{how}, improved", self._improved(host_of)

    def _orders(self) -> Iterator[list[int]]:
        """Orders of the leaf groups in which groups that share switches are neighbours."""
        sizes = [len(some) for some in self.seats_of]
        total: dict[tuple[int, ...], int] = {}
        for g, path in enumerate(self.above):
            for depth in range(1, len(path) + 1):
                key = path[:depth]
                total[key] = total.get(key, 0) + sizes[g]

        def order(sign: int, noise: Callable[[], float]) -> list[int]:
            drawn = {key: noise() for key in total}

            def key(g: int) -> tuple[tuple[float, float, int], ...]:
                path = self.above[g]
                return tuple(
                    (drawn[path[:d]], sign * total[path[:d]], path[d - 1])
                    for d in range(1, len(path) + 1)
                )

            return sorted(range(len(sizes)), key=key)

        yield order(-1, lambda: 0.0)
        for number in range(1, self.starts):
            generator = random.Random(number)
            yield order(1, (lambda: 0.0) if number == 1 else generator.random)

    # --- walks -------------------------------------------------------------------------------

    def _walks(self) -> list[tuple[str, list[int]]]:
        if self.grid is None:
            return []
        layers = [(layer.price, layer.sizes) for layer in self.seats.layers]
        orders = list(itertools.islice(self._orders(), 2))
        seats = [[s for g in order for s in self.seats_of[g]] for order in orders]
        scored: dict[float, list[int]] = {}
        for walk in walks(self.grid, self.demand, layers, 4 * self.starts):
            for some in seats:
                host_of = [0] * self.demand.hosts
                for host, seat in zip(walk, some, strict=True):
                    host_of[host] = seat
                scored.setdefault(self.scorer.crossing(host_of), host_of)
        return [("walk", scored[cost]) for cost in sorted(scored)[:4]]

    # --- halves ------------------------------------------------------------------------------

    def _halves(self, order: Sequence[int]) -> list[int]:
        host_of = [0] * self.demand.hosts
        for host, g in self._divided(list(range(self.demand.hosts)), list(order)).items():
            host_of[host] = g
        return seated(host_of, [-1] * self.demand.hosts, self.seats_of)

    def _divided(self, nodes: list[int], groups: list[int]) -> dict[int, int]:
        """Host -> leaf group, for hosts that just fill these groups."""
        found: dict[int, int] = {}
        todo = [(nodes, groups)]
        while todo:
            nodes, groups = todo.pop()
            if len(groups) == 1:
                found.update(dict.fromkeys(nodes, groups[0]))
                continue
            split, left = self._halve(nodes, groups)
            todo.append(([v for v, s in zip(nodes, left, strict=True) if s], groups[:split]))
            todo.append(([v for v, s in zip(nodes, left, strict=True) if not s], groups[split:]))
        return found

    def _halve(self, nodes: list[int], groups: list[int]) -> tuple[int, list[bool]]:
        """(how many of the groups, which nodes): the cut that is least for what it divides."""
        sizes = list(itertools.accumulate(len(self.seats_of[g]) for g in groups))
        splits: list[int] = []
        for depth in range(len(self.above[0])):
            ups = [self.above[g][: depth + 1] for g in groups]
            splits = [i for i in range(1, len(groups)) if ups[i] != ups[i - 1]]
            if splits:
                break
        splits.sort(key=lambda i: abs(2 * sizes[i - 1] - sizes[-1]))
        sub = self.graph.part(nodes)
        sweeps = list(self._sweeps(sub, nodes))
        tried: list[tuple[float, int, list[bool]]] = []
        for split in splits[:2]:
            n = sizes[split - 1]
            weight = math.sqrt(min(n, len(nodes) - n))
            for sweep in sweeps:
                for some in (sweep[:n], sweep[len(nodes) - n :]):
                    left = [False] * len(nodes)
                    for a in some:
                        left[a] = True
                    tried.append((cut_of(sub, left) / weight, split, left))
        tried.sort(key=lambda item: item[:2])
        patience = max(40, len(nodes) // 20)
        best: tuple[float, int, list[bool]] | None = None
        for _, split, left in tried[:2]:
            n = sizes[split - 1]
            left = bisect(sub, left, 3, patience)
            cost = cut_of(sub, left) / math.sqrt(min(n, len(nodes) - n))
            if best is None or cost < best[0]:
                best = (cost, split, left)
        assert best is not None
        return best[1], best[2]

    def _sweeps(self, sub: Graph, nodes: Sequence[int]) -> Iterator[list[int]]:
        """Orders of 0..len(nodes)-1 whose beginnings are compact."""
        if self.grid is None:
            yield _breadth_first(sub)
            return
        for place in self._places:
            keys = [place[v] for v in nodes]
            yield sorted(range(len(nodes)), key=keys.__getitem__)

    @functools.cached_property
    def _places(self) -> list[list[int]]:
        """Of every sweep through the whole grid, by two axes to and fro: the place of each host."""
        grid = self.grid
        assert grid is not None
        axes = [k for k, size in enumerate(grid.axes) if size > 1]
        made = []
        for first in axes:
            for second in [k for k in axes if k != first] or [first]:
                rest = [grid.at[k] for k in axes if k not in (first, second)]
                x, y = grid.at[first], grid.at[second]
                keys = [
                    (x[v], y[v] if x[v] % 2 == 0 else -y[v], *(at[v] for at in rest))
                    for v in range(self.demand.hosts)
                ]
                place = [0] * len(keys)
                for number, v in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
                    place[v] = number
                made.append(place)
        return made

    # --- improvement -------------------------------------------------------------------------

    def _parts(self, host_of: Sequence[int]) -> Parts:
        leaf = self.seats.layers[0].group
        # Parts count both directions of what leaves.
        limit = 2 * self.scorer.least.fullest[0]
        return Parts(
            self.graph,
            [leaf[seat] for seat in host_of],
            self.distance,
            lambda cut: _OVERLOAD * max(0.0, cut - limit) ** 2 / limit if limit else 0.0,
        )

    def _improved(self, host_of: Sequence[int]) -> list[int]:
        parts = self._parts(host_of)
        parts.descend()
        return seated(parts.where, host_of, self.seats_of)

    def polished(self, host_of: Sequence[int], goal: float) -> list[int]:
        """Neighbouring groups are divided anew, a few at a time; what helps the goal is kept."""
        parts = self._parts(host_of)
        draw = random.Random(0)
        seat = [some[0] for some in self.seats_of]  # any seat of a group scores alike
        edges = sum(map(len, self.graph.neighbours)) // 2
        rounds = min(_POLISH_MOST, max(_POLISH_LEAST, _POLISH_EDGES // max(1, edges)))
        vain = 0
        for _ in range(rounds):
            if vain > _POLISH_VAIN * len(self.seats_of):
                break
            vain += 1
            first = draw.randrange(len(self.seats_of))
            near = parts.beside(first)[:6]
            if not near:
                continue
            some = [first, *draw.sample(near, min(len(near), draw.randint(1, 3)))]
            draw.shuffle(some)
            # Groups that share higher switches stay neighbours.
            some.sort(key=lambda g: self.above[g][:-1])
            nodes = sorted(i for g in some for i in parts.members[g])
            for i, g in self._divided(nodes, some).items():
                if parts.where[i] != g:
                    parts.move(i, g)
            parts.descend(some)
            found = self.scorer.goal(self.scorer.score([seat[g] for g in parts.where]))
            if found < goal * (1 - 1e-12):
                goal, vain = found, 0
                parts.keep()
            else:
                parts.undo()
        return seated(parts.where, host_of, self.seats_of)


def seated(
    where: Sequence[int], host_of: Sequence[int], seats_of: Sequence[Sequence[int]]
) -> list[int]:
    """Seats for hosts in these groups; who stays in its group keeps its seat."""
    made = [-1] * len(where)
    inside = [set(some) for some in seats_of]
    for host, (g, seat) in enumerate(zip(where, host_of, strict=True)):
        if seat in inside[g]:
            made[host] = seat
            inside[g].discard(seat)
    free = [
        iter([s for s in some if s in left]) for some, left in zip(seats_of, inside, strict=True)
    ]
    for host, g in enumerate(where):
        if made[host] < 0:
            made[host] = next(free[g])
    return made


def _breadth_first(graph: Graph) -> list[int]:
    """From a node far out, by levels, as Cuthill and McKee: near nodes are near in the order."""
    order: list[int] = []
    seen = [False] * graph.nodes
    for root in range(graph.nodes):
        if seen[root]:
            continue
        far = _levels(graph, root, list(seen))[-1]
        order += _levels(graph, far, seen)
    return order


def _levels(graph: Graph, root: int, seen: list[bool]) -> list[int]:
    queue, seen[root] = [root], True
    for i in queue:
        near = [j for j, _ in sorted(graph.neighbours[i], key=lambda edge: -edge[1])]
        for q in graph.member_of[i]:
            near += graph.cliques[q][0]
        for j in near:
            if not seen[j]:
                seen[j] = True
                queue.append(j)
    return queue
