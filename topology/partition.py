"""Divides the logical hosts of a job among switches of given sizes, so that little is cut.

Everything here is integers: nodes 0..n-1, parts 0..k-1 with exact sizes.  A `Graph` holds what the
nodes exchange; groups that talk all to all are kept as groups, since their cut follows from how
many members each part holds, and their edges would be the square of that.

Two searches: `bisect` improves a division into two with Fiduccia's and Mattheyses' method, the
sizes exact; `improve` moves nodes around cycles of parts (swaps are the cycles of two), with moves
that lose taken for a while, as Kernighan and Lin do.  Both are deterministic, and neither looks at
a clock: every host must come to the same answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

#: Gains below this share of a node's weight are rounding.
EPSILON = 1e-9


@dataclass(frozen=True)
class Graph:
    """What nodes exchange, both directions added up.

    neighbours[i] is ((j, weight), ...); cliques are (members, weight of each pair); member_of[i]
    lists the cliques of node i.
    """

    nodes: int
    neighbours: Sequence[Sequence[tuple[int, float]]]
    cliques: Sequence[tuple[Sequence[int], float]] = ()
    member_of: Sequence[Sequence[int]] = field(default=())

    @staticmethod
    def of(
        nodes: int,
        edges: Iterable[tuple[int, int, float]],
        cliques: Iterable[tuple[Sequence[int], float]] = (),
    ) -> Graph:
        """Edges may repeat and have either direction; cliques of two become edges."""
        weights: list[dict[int, float]] = [{} for _ in range(nodes)]
        kept: list[tuple[tuple[int, ...], float]] = []
        pairs = list(edges)
        for members, weight in cliques:
            if len(members) == 2:
                pairs.append((members[0], members[1], weight))
            elif len(members) > 2:
                kept.append((tuple(members), weight))
        for a, b, weight in pairs:
            if a != b and weight:
                weights[a][b] = weights[a].get(b, 0.0) + weight
                weights[b][a] = weights[b].get(a, 0.0) + weight
        member_of: list[list[int]] = [[] for _ in range(nodes)]
        for index, (members, _) in enumerate(kept):
            for node in members:
                member_of[node].append(index)
        return Graph(nodes, [tuple(row.items()) for row in weights], kept, member_of)

    def part(self, nodes: Sequence[int]) -> Graph:
        """The graph among `nodes`, renumbered in their order."""
        if len(nodes) == self.nodes and all(a == b for a, b in enumerate(nodes)):
            return self
        index = {node: i for i, node in enumerate(nodes)}
        neighbours = [
            tuple((index[j], w) for j, w in self.neighbours[node] if j in index) for node in nodes
        ]
        cliques: list[tuple[list[int], float]] = []
        member_of: list[list[int]] = [[] for _ in nodes]
        for q in dict.fromkeys(q for node in nodes for q in self.member_of[node]):
            members, weight = self.cliques[q]
            inside = [index[j] for j in members if j in index]
            if len(inside) > 1:
                for i in inside:
                    member_of[i].append(len(cliques))
                cliques.append((inside, weight))
        return Graph(len(nodes), neighbours, cliques, member_of)


def cuts(graph: Graph, where: Sequence[int], parts: int) -> list[float]:
    """What each part exchanges with all others, both directions added up."""
    out = [0.0] * parts
    for i, row in enumerate(graph.neighbours):
        here = where[i]
        for j, weight in row:
            if where[j] != here:
                out[here] += weight
    for members, weight in graph.cliques:
        count: dict[int, int] = {}
        for i in members:
            count[where[i]] = count.get(where[i], 0) + 1
        for p, inside in count.items():
            out[p] += weight * inside * (len(members) - inside)
    return out


def cut_of(graph: Graph, left: Sequence[bool]) -> float:
    """What the nodes with left[i] exchange with the others: cuts() for two parts."""
    total = 0.0
    for row, here in zip(graph.neighbours, left, strict=True):
        if here:
            for j, weight in row:
                if not left[j]:
                    total += weight
    for members, weight in graph.cliques:
        inside = sum(left[i] for i in members)
        total += weight * inside * (len(members) - inside)
    return total


def bisect(graph: Graph, left: Sequence[bool], passes: int = 4, patience: int = 60) -> list[bool]:
    """A division into two with the same sizes and no larger a cut.

    left[i] says whether node i is in the first part.  A pass moves nodes one by one from the part
    that is full, best gain first, each node once, and keeps the best balanced state on its way; it
    ends when `patience` moves in a row have not led to a better one.
    """
    side = [bool(s) for s in left]
    count = [[0, 0] for _ in graph.cliques]
    for i, s in enumerate(side):
        for q in graph.member_of[i]:
            count[q][s] += 1
    for _ in range(passes):
        if not _bisect_pass(graph, side, count, patience):
            break
    return side


def _bisect_pass(graph: Graph, side: list[bool], count: list[list[int]], patience: int) -> bool:
    neighbours, cliques, member_of = graph.neighbours, graph.cliques, graph.member_of
    gain = [0.0] * graph.nodes
    heaps: tuple[list[tuple[float, int]], list[tuple[float, int]]] = ([], [])
    for i, row in enumerate(neighbours):
        here, g = side[i], 0.0
        for j, weight in row:
            g += weight if side[j] != here else -weight
        for q in member_of[i]:
            g += cliques[q][1] * (count[q][not here] - count[q][here] + 1)
        gain[i] = g
        heaps[here].append((-g, i))
    heapq.heapify(heaps[0])
    heapq.heapify(heaps[1])
    locked = [False] * graph.nodes
    moves: list[int] = []
    total = best = 0.0
    best_at = 0
    turn = len(heaps[1]) >= len(heaps[0])
    while len(moves) - best_at < patience:
        heap = heaps[turn]
        while heap and (locked[heap[0][1]] or -heap[0][0] != gain[heap[0][1]]):
            heapq.heappop(heap)
        if not heap:
            break
        i = heapq.heappop(heap)[1]
        here = side[i]
        locked[i] = True
        total += gain[i]
        side[i] = not here
        moves.append(i)
        for j, weight in neighbours[i]:
            if not locked[j]:
                gain[j] += -2 * weight if side[j] != here else 2 * weight
                heapq.heappush(heaps[side[j]], (-gain[j], j))
        for q in member_of[i]:
            members, weight = cliques[q]
            count[q][here] -= 1
            count[q][not here] += 1
            for j in members:
                if not locked[j]:
                    gain[j] += -2 * weight if side[j] != here else 2 * weight
                    heapq.heappush(heaps[side[j]], (-gain[j], j))
        turn = not turn
        if len(moves) % 2 == 0 and total > best + EPSILON * abs(best):
            best, best_at = total, len(moves)
    for i in moves[best_at:]:
        for q in member_of[i]:
            count[q][side[i]] -= 1
            count[q][not side[i]] += 1
        side[i] = not side[i]
    return best_at > 0


class Parts:
    """A division of a graph among parts, and what it costs.

    The cost is the sum over all edges of weight times distance[p][q] of the parts that they join,
    plus overload(cut of the part) of every part.
    """

    #: A cycle of more parts than this is not looked for.
    LONGEST = 4
    #: Of the parts that a node could move to, those it gains most in.
    WIDTH = 4

    def __init__(
        self,
        graph: Graph,
        where: Sequence[int],
        distance: Sequence[Sequence[float]],
        overload: Callable[[float], float],
    ) -> None:
        self.graph, self.distance, self.overload = graph, distance, overload
        self.where = list(where)
        self.members: list[set[int]] = [set() for _ in distance]
        for i, p in enumerate(self.where):
            self.members[p].add(i)
        self.cut = cuts(graph, self.where, len(distance))
        self.counts: list[dict[int, int]] = []
        for members, _ in graph.cliques:
            count: dict[int, int] = {}
            for i in members:
                count[self.where[i]] = count.get(self.where[i], 0) + 1
            self.counts.append(count)
        self._moves: list[list[tuple[float, int, int]] | None] = [None] * len(distance)
        self._gains: list[list[tuple[int, float]] | None] = [None] * graph.nodes
        #: (node, part it was in) of every move since the last `keep`.
        self._log: list[tuple[int, int]] = []

    def cost(self) -> float:
        total = 0.0
        for i, row in enumerate(self.graph.neighbours):
            away = self.distance[self.where[i]]
            for j, weight in row:
                total += weight * away[self.where[j]] / 2
        for (_, weight), count in zip(self.graph.cliques, self.counts, strict=True):
            for p, a in count.items():
                for q, b in count.items():
                    total += weight * a * b * self.distance[p][q] / 2
        return total + sum(map(self.overload, self.cut))

    def towards(self, i: int) -> dict[int, float]:
        """Weight between node i and each part it has something to do with."""
        where = self.where
        found: dict[int, float] = {}
        for j, weight in self.graph.neighbours[i]:
            p = where[j]
            found[p] = found.get(p, 0.0) + weight
        for q in self.graph.member_of[i]:
            weight = self.graph.cliques[q][1]
            for p, count in self.counts[q].items():
                found[p] = found.get(p, 0.0) + weight * count
            found[where[i]] -= weight
        return found

    def move(self, i: int, target: int) -> float:
        """Move node i; what the whole cost falls by."""
        source, links = self.where[i], self.towards(i)
        here, there = self.distance[source], self.distance[target]
        gained, total = 0.0, 0.0
        for p, weight in links.items():
            gained += weight * (here[p] - there[p])
            total += weight
        cut, overload = self.cut, self.overload
        gained += overload(cut[source]) + overload(cut[target])
        cut[source] += 2 * links.get(source, 0.0) - total
        cut[target] += total - 2 * links.get(target, 0.0)
        gained -= overload(cut[source]) + overload(cut[target])
        self._log.append((i, source))
        self.where[i] = target
        self.members[source].discard(i)
        self.members[target].add(i)
        for q in self.graph.member_of[i]:
            count = self.counts[q]
            count[target] = count.get(target, 0) + 1
            count[source] -= 1
            if not count[source]:
                del count[source]
        gains = self._gains
        gains[i] = None
        for j, _ in self.graph.neighbours[i]:
            gains[j] = None
        for q in self.graph.member_of[i]:
            for j in self.graph.cliques[q][0]:
                gains[j] = None
        self._moves[source] = self._moves[target] = None
        for p in links:
            self._moves[p] = None
        return gained

    def moves(self, p: int) -> list[tuple[float, int, int]]:
        """(gain, node, target): for each part that p has to do with, its best node to go there."""
        known = self._moves[p]
        if known is None:
            best: dict[int, tuple[float, int]] = {}
            gains = self._gains
            for i in sorted(self.members[p]):
                some = gains[i]
                if some is None:
                    some = gains[i] = self._gains_of(i)
                for target, g in some:
                    if target not in best or g > best[target][0]:
                        best[target] = (g, i)
            known = sorted(((g, i, t) for t, (g, i) in best.items()), reverse=True)[: self.WIDTH]
            self._moves[p] = known
        return known

    def _gains_of(self, i: int) -> list[tuple[int, float]]:
        """(target, gain) of the parts that node i has to do with, other than its own."""
        links, here = self.towards(i), self.where[i]
        if len(links) == 1 and here in links:
            return []
        stay = 0.0
        for part, weight in links.items():
            stay += weight * self.distance[here][part]
        found = []
        for target in links:
            if target != here:
                there, g = self.distance[target], stay
                for part, weight in links.items():
                    g -= weight * there[part]
                found.append((target, g))
        return found

    def best_cycle(self, start: int) -> tuple[float, list[tuple[int, int]]]:
        """The cycle of parts through `start` that promises most: (promise, [(node, target)])."""
        best_total, best_path = -float("inf"), []
        moves = self.moves

        def walk(p: int, total: float, path: list[tuple[int, int]], seen: tuple[int, ...]) -> None:
            nonlocal best_total, best_path
            for g, i, target in moves(p):
                if target == start:
                    if len(path) and total + g > best_total:
                        best_total, best_path = total + g, [*path, (i, target)]
                elif target not in seen and len(seen) < self.LONGEST:
                    walk(target, total + g, [*path, (i, target)], (*seen, target))

        walk(start, 0.0, [], (start,))
        return best_total, best_path

    def apply(self, path: Sequence[tuple[int, int]]) -> tuple[float, list[tuple[int, int]]]:
        """Make these moves; what the cost falls by, and the moves that undo them."""
        undo = [(i, self.where[i]) for i, _ in path]
        return sum(self.move(i, target) for i, target in path), undo[::-1]

    def keep(self) -> None:
        """What has been moved stays."""
        self._log.clear()

    def undo(self) -> None:
        """Take back all moves since the last `keep`."""
        for i, source in reversed(self._log.copy()):
            self.move(i, source)
        self._log.clear()

    def beside(self, p: int) -> list[int]:
        """Parts that p exchanges something with, most first."""
        found: dict[int, float] = {}
        for i in self.members[p]:
            for q, weight in self.towards(i).items():
                if q != p:
                    found[q] = found.get(q, 0.0) + weight
        return sorted(found, key=lambda q: (-found[q], q))

    def descend(self, parts: Iterable[int] | None = None) -> float:
        """Take improving cycles through `parts` and through what changes, until none is left."""
        todo = dict.fromkeys(range(len(self.distance)) if parts is None else parts)
        gained = 0.0
        while todo:
            p = next(iter(todo))
            del todo[p]
            promise, path = self.best_cycle(p)
            if promise <= 0 or not path:
                continue
            delta, undo = self.apply(path)
            if delta <= EPSILON * (1 + abs(promise)):
                self.apply(undo)
                continue
            gained += delta
            for i, _ in path:
                todo[self.where[i]] = None
                for j in self.towards(i):
                    todo[j] = None
        return gained
