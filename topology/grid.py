"""Recovers the grid behind families of groups, and walks it in orders that are good to cut.

Tensor, data and pipeline parallel groups are the lines of a grid.  Placement knows only the
groups; where they are the lines of one, their members' positions are coordinates, and runs along a
walk through the grid are boxes that few lines leave.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from commkit.topology.traffic import Demand, HostFamily

#: Inner extents of a walk's loops are tried up to this size, or in full.
LARGEST_INNER = 64
#: Ways to cut the axes into loops that are tried; longer axes are then cut in fewer ways.
MOST_CUTS = 600


@dataclass(frozen=True)
class Grid:
    """axes[k] is the size of axis k, at[k][i] the coordinate of host i on it.

    families[k] are the indices of the families whose groups are the lines of axis k.
    """

    axes: tuple[int, ...]
    at: tuple[tuple[int, ...], ...]
    families: tuple[tuple[int, ...], ...]


def grids(demand: Demand) -> list[Grid]:
    """The grids whose lines are groups of some of the families, most axes first.

    Every host is in one group of each of these families, positions in them tell all hosts apart,
    and groups of one keep the positions in all others.  An axis without a family is added where
    the families leave copies that do not talk.  Families whose groups have the same members are
    one axis.  [] where there is no such grid.
    """
    axes: list[tuple[int, tuple[int, ...], list[int]]] = []  # size, positions, families
    for index, family in enumerate(demand.families):
        found = _positions(demand.hosts, family)
        if found is None:
            continue
        for size, at, same in axes:
            if size == found[0] and at == found[1] and _alike(demand, same[0], index):
                same.append(index)
                break
        else:
            axes.append((*found, [index]))
    made: list[Grid] = []
    for count in range(min(len(axes), 6), 0, -1):
        for chosen in itertools.combinations(axes, count):
            grid = _grid(demand, chosen)
            if grid is not None:
                made.append(grid)
    # Of two grids the finer one describes more; a coarser one is kept if it has other families.
    kept: list[Grid] = []
    for grid in made:
        names = {f for some in grid.families for f in some}
        if not any(names <= {f for some in other.families for f in some} for other in kept):
            kept.append(grid)
    return kept


def _positions(hosts: int, family: HostFamily) -> tuple[int, tuple[int, ...]] | None:
    """(size of its groups, position of each host), if each host is in exactly one group."""
    at = [-1] * hosts
    size = len(family.groups[0].hosts)
    for group in family.groups:
        if len(group.hosts) != size:
            return None
        for position, host in enumerate(group.hosts):
            if at[host] >= 0:
                return None
            at[host] = position
    return None if -1 in at else (size, tuple(at))


def _alike(demand: Demand, a: int, b: int) -> bool:
    return {g.hosts for g in demand.families[a].groups} == {
        g.hosts for g in demand.families[b].groups
    }


def _grid(demand: Demand, chosen: Sequence[tuple[int, tuple[int, ...], list[int]]]) -> Grid | None:
    product = math.prod(size for size, _, _ in chosen)
    if demand.hosts % product:
        return None
    for k, (_, _, some) in enumerate(chosen):
        others = [at for j, (_, at, _) in enumerate(chosen) if j != k]
        for group in demand.families[some[0]].groups:
            first = group.hosts[0]
            if any(at[host] != at[first] for at in others for host in group.hosts):
                return None
    sizes, at = [size for size, _, _ in chosen], [at for _, at, _ in chosen]
    families = [tuple(some) for _, _, some in chosen]
    copies = demand.hosts // product
    label = _component_labels(demand, [some[0] for some in families])
    if max(label) + 1 != copies:
        return None
    if copies > 1:
        sizes.append(copies)
        at.append(tuple(label))
        families.append(())
    if len(set(zip(*at, strict=True))) != demand.hosts:
        return None
    return Grid(tuple(sizes), tuple(at), tuple(families))


def _component_labels(demand: Demand, families: Sequence[int]) -> list[int]:
    """Host -> number of its connected part, by first appearance."""
    parent = list(range(demand.hosts))

    def find(x: int) -> int:
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    for index in families:
        for group in demand.families[index].groups:
            root = find(group.hosts[0])
            for host in group.hosts[1:]:
                parent[find(host)] = root
    numbers: dict[int, int] = {}
    return [numbers.setdefault(find(host), len(numbers)) for host in range(demand.hosts)]


def walks(
    grid: Grid, demand: Demand, layers: Sequence[tuple[float, Sequence[int]]], most: int
) -> list[list[int]]:
    """Orders of all hosts whose runs are boxes of the grid: those that promise least, best first.

    Each axis is cut into an outer and an inner loop, the loops are nested in many ways, and each
    turns round where the one around it advances, so that a run that ends in the middle of a row
    still touches the next.  `layers` are (price, lengths of the runs): what the runs promise to
    send is estimated from the boxes that those of the commonest and the largest lengths fill.
    """
    weights = [
        [sum(_egress(demand.families[f], size, c) for f in some) for c in range(size + 1)]
        for some, size in zip(grid.families, grid.axes, strict=True)
    ]
    wanted: list[tuple[float, int]] = []  # what a byte of this run counts, its length
    for price, sizes in layers:
        count = Counter(sizes)
        common = sorted(count, key=lambda n: (-count[n] * n, n))[:3]
        wanted += [(price * count[n], n) for n in {*common, max(sizes)}]
    ranked: list[tuple[float, int, _Nest, tuple[int, ...]]] = []
    for number, (nest, inner) in enumerate(_nests(grid)):
        promise = sum(times * _box_egress(grid, nest, n, weights) for times, n in wanted)
        ranked.append((promise, number, nest, inner))
    ranked.sort(key=lambda item: item[:2])
    host_of = _numbering(grid)
    strides = [math.prod(grid.axes[:k]) for k in range(len(grid.axes))]
    made: dict[tuple[int, ...], None] = {}
    for _, _, nest, inner in ranked[: 4 * most]:
        made[tuple(host_of[x] for x in _walk(nest, inner, strides))] = None
        if len(made) == most:
            break
    return [list(walk) for walk in made]


#: Nested loops, the outermost first: (axis, inner loop of the axis or outer, extent).
_Nest = tuple[tuple[int, bool, int], ...]


def _nests(grid: Grid) -> Iterator[tuple[_Nest, tuple[int, ...]]]:
    """Nests and the inner extent of each axis; at most MOST_NESTS, coarser cuts of long axes."""
    divisors = [
        [f for f in range(1, n + 1) if n % f == 0 and (f <= LARGEST_INNER or f == n)]
        for n in grid.axes
    ]
    while math.prod(map(len, divisors)) > MOST_CUTS:
        longest = max(divisors, key=len)
        longest[:] = [longest[0], *longest[1:-1:2], longest[-1]]
        if max(map(len, divisors)) <= 2:
            break
    seen: set[_Nest] = set()
    for inner in itertools.product(*divisors):
        loops: list[tuple[int, bool, int]] = []
        for k, f in enumerate(inner):
            if f > 1:
                loops.append((k, True, f))
            if grid.axes[k] // f > 1:
                loops.append((k, False, grid.axes[k] // f))
        for nest in _nestings(loops):
            if nest not in seen:
                seen.add(nest)
                yield nest, inner


def _nestings(loops: Sequence[tuple[int, bool, int]]) -> Iterator[_Nest]:
    """Permutations in which an axis' inner loop is inside its outer one; all inner ones last.

    Outer loops around inner loops: a run is a box of inner extents, grown along one outer loop.
    """
    outer = [loop for loop in loops if not loop[1]]
    inner = [loop for loop in loops if loop[1]]
    for a in itertools.permutations(outer):
        for b in itertools.permutations(inner):
            yield (*a, *b)


def _egress(family: HostFamily, size: int, members: int) -> float:
    """What a line sends out of a set that holds `members` neighbours of it."""
    if not 0 < members < size:
        return 0.0
    unit = family.groups[0].edge_bytes
    if family.pattern == "pairs":
        return unit * members * (size - members)
    return unit * (2 if family.pattern in ("tree", "loop") and size > 2 else 1)


def _box_egress(grid: Grid, nest: _Nest, n: int, weights: Sequence[Sequence[float]]) -> float:
    """Egress of the box that the first n of a walk fill."""
    extent = [1] * len(grid.axes)
    left = n
    for k, _, size in reversed(nest):
        covered = min(size, left)
        extent[k] *= covered
        left = -(-left // size)
        if left <= 1:
            break
    volume = math.prod(extent)
    return sum(volume // e * weights[k][e] for k, e in enumerate(extent))


def _numbering(grid: Grid) -> list[int]:
    """Mixed-radix number of the coordinates -> host."""
    strides = [math.prod(grid.axes[:k]) for k in range(len(grid.axes))]
    host_of = [0] * math.prod(grid.axes)
    for host, key in enumerate(zip(*grid.at, strict=True)):
        host_of[sum(x * s for x, s in zip(key, strides, strict=True))] = host
    return host_of


def _walk(nest: _Nest, inner: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Numbers of the grid's points under nested loops that turn at every step around them."""
    indices = [0]
    for k, is_inner, extent in nest:
        step = strides[k] * (1 if is_inner else inner[k])
        forth = [x * step for x in range(extent)]
        back = forth[::-1]
        indices = [
            base + x for place, base in enumerate(indices) for x in (back if place % 2 else forth)
        ]
    return indices
