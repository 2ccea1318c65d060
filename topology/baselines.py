"""What a placement is compared with: orders that launchers and people use, greedy, METIS.

Each is host_of[logical host] = seat, seats in the launcher's order.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from commkit.errors import UsageError
from commkit.topology.partition import Graph
from commkit.topology.placement import graph_of
from commkit.topology.seats import Seats
from commkit.topology.traffic import Demand


def launcher_order(hosts: int) -> list[int]:
    """As the launcher lists the hosts."""
    return list(range(hosts))


def table_order(positions: Sequence[int]) -> list[int]:
    """As Slurm numbers the hosts of an allocation: by their place in its node table, for which
    the order of the topology's file stands; positions[seat] is that place."""
    return sorted(range(len(positions)), key=lambda seat: (positions[seat], seat))


def natural_order(names: Sequence[str]) -> list[int]:
    """By name, numbers in names by their value."""

    def key(seat: int) -> list[tuple[int, int, str]]:
        parts = re.findall(r"\d+|\D+", names[seat])
        return [(0, int(p), p) if p.isdigit() else (1, 0, p) for p in parts]

    return sorted(range(len(names)), key=key)


def random_order(hosts: int, seed: int = 0) -> list[int]:
    made = list(range(hosts))
    random.Random(seed).shuffle(made)
    return made


def greedy(demand: Demand, seats: Seats) -> list[int]:
    """Switch by switch, the host that is most connected to those already under it next."""
    graph = graph_of(demand)
    host_of = [-1] * demand.hosts
    waiting = dict.fromkeys(range(demand.hosts))
    for some in _groups(seats):
        pull: dict[int, float] = {}
        for seat in some:
            pool = pull or dict.fromkeys([next(iter(waiting))], 0.0)
            host = max(pool, key=lambda i: (pool[i], -i))
            host_of[host] = seat
            del waiting[host]
            pull.pop(host, None)
            for j, weight in _near(graph, host):
                if j in waiting:
                    pull[j] = pull.get(j, 0.0) + weight
    return host_of


def _near(graph: Graph, host: int) -> Iterator[tuple[int, float]]:
    yield from graph.neighbours[host]
    for q in graph.member_of[host]:
        members, weight = graph.cliques[q]
        yield from ((j, weight) for j in members if j != host)


def _groups(seats: Seats) -> list[list[int]]:
    """Seats of each leaf group, groups that share higher switches one after the other."""
    leaf = seats.layers[0].group if seats.layers else (0,) * seats.hosts
    some: list[list[int]] = [[] for _ in range(max(leaf, default=-1) + 1)]
    for seat, g in enumerate(leaf):
        some[g].append(seat)
    above = [layer.group for layer in reversed(seats.layers)]
    return sorted(some, key=lambda group: ([up[group[0]] for up in above], -len(group)))


def metis(demand: Demand, seats: Seats) -> list[int]:
    """METIS' recursive bisection, layer by layer from the top; sizes are repaired to be exact.

    Raises UsageError where pymetis is not installed.
    """
    try:
        pymetis = importlib.import_module("pymetis")
    except ImportError as error:
        raise UsageError(f"{error}: pip install pymetis, or leave METIS out") from None
    graph = graph_of(demand)
    host_of = [-1] * demand.hosts
    layers = [layer.group for layer in reversed(seats.layers)]

    def divide(nodes: list[int], some: list[int], depth: int) -> None:
        groups: dict[int, list[int]] = {}
        for seat in some:
            groups.setdefault(layers[depth][seat] if depth < len(layers) else -1, []).append(seat)
        parts = list(groups.values())
        where = _metis_parts(pymetis, graph.part(nodes), [len(part) for part in parts])
        for p, part in enumerate(parts):
            inside = [v for v, q in zip(nodes, where, strict=True) if q == p]
            if depth + 1 < len(layers):
                divide(inside, part, depth + 1)
            else:
                for host, seat in zip(inside, part, strict=True):
                    host_of[host] = seat

    divide(list(range(demand.hosts)), [s for group in _groups(seats) for s in group], 0)
    return host_of


def _metis_parts(pymetis: Any, graph: Graph, sizes: Sequence[int]) -> list[int]:
    if len(sizes) == 1:
        return [0] * graph.nodes
    rows: list[dict[int, float]] = [dict(row) for row in graph.neighbours]
    for members, weight in graph.cliques:
        for i in members:
            for j in members:
                if i != j:
                    rows[i][j] = rows[i].get(j, 0.0) + weight
    least = min((w for row in rows for w in row.values()), default=1.0)
    starts, targets, weights = [0], [], []
    for row in rows:
        for j, w in row.items():
            targets.append(j)
            weights.append(max(1, round(w / least * 4)))
        starts.append(len(targets))
    shares = [n / graph.nodes for n in sizes]
    _, found = pymetis.part_graph(
        len(sizes),
        adjacency=pymetis.CSRAdjacency(adj_starts=starts, adjacent=targets),
        eweights=weights,
        tpwgts=shares,
        recursive=True,
        options=pymetis.Options(seed=1, ufactor=1),
    )
    return _repaired(graph, [int(p) for p in found], sizes)


def _repaired(graph: Graph, where: list[int], sizes: Sequence[int]) -> list[int]:
    """Move nodes from parts that are too large, those that lose least."""
    count = [0] * len(sizes)
    for p in where:
        count[p] += 1
    for p, size in enumerate(sizes):
        while count[p] < size:

            def loss(i: int, target: int = p) -> tuple[float, int]:
                here = sum(w for j, w in _near(graph, i) if where[j] == where[i])
                there = sum(w for j, w in _near(graph, i) if where[j] == target)
                return here - there, i

            spare = [i for i, q in enumerate(where) if count[q] > sizes[q]]
            beside = [i for i in spare if any(where[j] == p for j, _ in _near(graph, i))]
            best = min(beside or spare, key=loss)
            count[where[best]] -= 1
            where[best] = p
            count[p] += 1
    return where


#: Contenders by name, for `placement.place(others=...)`.
CONTENDERS: dict[str, Callable[[Demand, Seats], list[int]]] = {"greedy": greedy, "metis": metis}
