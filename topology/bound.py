"""How few bytes must leave a switch, whatever the placement.

Let S be the n logical hosts that sit under one switch, on a grid whose lines are the groups of the
families.  A line along axis k of which S holds c members, 0 < c < N, sends out at least phi_k(c):

    ring, tree, line   u             one edge, or the two halves of the double tree, must be cut
    loop               2 u           a set that is not all of a loop has two ends
    pairs              u c (N - c)   u between each pair

phi_k(0) = phi_k(N) = 0, and each phi_k is concave.  The egress of S is at least the sum of
phi(members) over all lines.  That sum does not grow when S is compressed along an axis: pushed
to the low end of every line.  Lines along that axis keep their counts; along another axis the new
counts majorise the old ones (Gale, Ryser), and the sum of a concave function over counts can then
only fall.  Compressing until nothing moves gives a down-set, whose slices along an axis have sizes
n_1 >= n_2 >= ... that add up to n, and exactly n_c - n_(c+1) lines along the axis hold c members:

    B_d(n) = min over n_1 >= n_2 >= ... of  sum_c B_(d-1)(n_c) + (n_c - n_(c+1)) phi(c)

With B_1 = phi this is a lower bound for any order of the axes (we take the best), and on two axes
the exact minimum of the sum.  For sets too large for that recursion the inequality of Loomis and
Whitney gives a weaker one: p_k lines touched along axis k, of which f_k are full, cost at least
sum u_k (p_k - f_k), the product of the p_k is at least n^(d-1), f_k <= n / N_k.

Families that are not the lines of a grid are bounded one by one: groups are filled one after the
other.  Sums of minima are minima of sums, or less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from commkit.topology.grid import Grid, grids
from commkit.topology.traffic import Demand, HostFamily

#: Up to this many hosts under a switch the recursion is computed; it costs their square.
EXACT = 128

Phi = Callable[[int], float]


@dataclass(frozen=True)
class Bound:
    """Bytes a step that leave the groups of one level: each of them, all together, the fullest."""

    groups: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.groups)

    @property
    def fullest(self) -> float:
        return max(self.groups, default=0.0)


class LowerBounds:
    """egress(n): the least that n logical hosts can send to the rest of the job."""

    def __init__(self, demand: Demand) -> None:
        self._hosts = demand.hosts
        self._cases: list[tuple[list[_Axis], list[HostFamily]]] = []
        families = demand.families
        for grid in grids(demand):
            axes = _axes(grid, families)
            inside = {f for some in grid.families for f in some}
            rest = [family for i, family in enumerate(families) if i not in inside]
            self._cases.append((axes, rest))
        if not self._cases:
            self._cases.append(([], list(families)))
        self._tables: dict[tuple[int, int], list[float]] = {}
        self._known: dict[int, float] = {}

    def egress(self, n: int) -> float:
        """Bytes a step, all rails together; 0 for none or all of the hosts."""
        if n <= 0 or n >= self._hosts:
            return 0.0
        if n not in self._known:
            self._known[n] = max(
                (self._grid(case, n) if axes else 0.0)
                + sum(_alone(f, n, self._hosts) for f in rest)
                for case, (axes, rest) in enumerate(self._cases)
            )
        return self._known[n]

    def of(self, sizes: Iterable[int]) -> Bound:
        """For groups of so many hosts each."""
        wanted = list(sizes)
        self._prepare(max((n for n in wanted if n <= EXACT), default=0))
        return Bound(tuple(self.egress(n) for n in wanted))

    def _prepare(self, largest: int) -> None:
        for case, (axes, _) in enumerate(self._cases):
            if not axes:
                continue
            for which, order in enumerate(_orders(axes)):
                if len(self._tables.get((case, which), ())) <= largest:
                    self._tables[case, which] = _recursion(order, largest)

    def _grid(self, case: int, n: int) -> float:
        axes = self._cases[case][0]
        loose = 0.0
        if n > EXACT or len(axes) > 2:  # on two axes the recursion is exact
            loose = loomis_whitney(
                [(axis.size, axis.phi(1)) for axis in axes], n, math.prod(a.size for a in axes)
            )
        if n > EXACT:
            return loose
        self._prepare(n)
        return max(loose, *(self._tables[case, which][n] for which, _ in enumerate(_orders(axes))))


@dataclass(frozen=True)
class _Axis:
    size: int
    phi: Phi


def _axes(grid: Grid, families: Sequence[HostFamily]) -> list[_Axis]:
    axes = []
    for size, members in zip(grid.axes, grid.families, strict=True):
        phis = [_phi(families[f], size) for f in members]
        axes.append(_Axis(size, _sum(phis)))
    return axes


def _sum(phis: Sequence[Phi]) -> Phi:
    return lambda c: sum(phi(c) for phi in phis)


def _phi(family: HostFamily, size: int) -> Phi:
    """Concave, and what each of the family's groups sends at least: the smallest counts."""
    unit = min(group.edge_bytes for group in family.groups)
    if family.pattern == "edges":
        return lambda c: 0.0
    if family.pattern == "pairs":
        return lambda c: unit * c * (size - c)
    # Each of the two trees is connected, and its edges carry unit bytes both ways.
    factor = 2 if family.pattern == "tree" or (family.pattern == "loop" and size > 2) else 1
    return lambda c: unit * factor if 0 < c < size else 0.0


def _orders(axes: Sequence[_Axis]) -> list[Sequence[_Axis]]:
    """Orders of the axes in which slicing differs; every one bounds, some better."""
    return list(itertools.permutations(axes)) if len(axes) > 2 else [axes]


def _recursion(axes: Sequence[_Axis], largest: int) -> list[float]:
    """B(n) for n = 0..largest; inf where n does not fit."""
    first = axes[0]
    table = [first.phi(c) if c <= first.size else math.inf for c in range(largest + 1)]
    for axis in axes[1:]:
        table = _sliced(table, axis, largest)
    return table


def _sliced(slices: Sequence[float], axis: _Axis, largest: int) -> list[float]:
    """B_d from B_(d-1), by the sizes of slices along `axis`.

    state[m][t]: least cost of the slices so far, the last of size m, t hosts in all; closing the
    m - m' lines that end here costs phi(c) each.
    """
    best = [0.0] + [math.inf] * largest
    state = [[math.inf] * (largest + 1) for _ in range(largest + 1)]
    for m in range(1, largest + 1):
        if slices[m] < math.inf:
            state[m][m] = slices[m]
    for c in range(1, min(axis.size, largest) + 1):
        phi = axis.phi(c)
        # Slices of c or more: none can be larger than largest / c.
        top = largest // c
        for m in range(1, top + 1):
            row = state[m]
            for t in range(c * m, largest + 1):
                best[t] = min(best[t], row[t] + m * phi)
        if c == axis.size:
            break
        following = [[math.inf] * (largest + 1) for _ in range(largest + 1)]
        running = [math.inf] * (largest + 1)  # min over m >= m' of state[m][t] + m phi
        for m in range(top, 0, -1):
            row, slice_ = state[m], slices[m]
            for t in range(c * m, largest + 1):
                value = row[t] + m * phi
                if value < running[t]:
                    running[t] = value
            if slice_ < math.inf:
                target = following[m]
                for t in range(c * m, largest + 1 - m):
                    if running[t] < math.inf:
                        target[t + m] = running[t] - m * phi + slice_
        state = following
    return best


def loomis_whitney(axes: Sequence[tuple[int, float]], n: int, total: int) -> float:
    """The weaker bound, for axes of (size, least that a touched and not full line sends)."""
    axes = [(size, unit) for size, unit in axes if size > 1]
    if not axes or n <= 0 or n >= total:
        return 0.0
    best = math.inf
    for full in itertools.product((False, True), repeat=len(axes)):
        if any(f and n < size for f, (size, _) in zip(full, axes, strict=True)):
            continue
        low = [max(1, math.ceil(n / size)) for size, _ in axes]
        high = [min(n, total // size) for size, _ in axes]
        credit = 0.0
        for k, (size, unit) in enumerate(axes):
            if full[k]:
                credit += unit * (n // size)
                low = [p if j == k else max(p, size) for j, p in enumerate(low)]
        if all(a <= b for a, b in zip(low, high, strict=True)):
            units = [unit for _, unit in axes]
            best = min(best, _least_lines(units, low, high, n ** (len(axes) - 1)) - credit)
    return max(0.0, best) if math.isfinite(best) else 0.0


def _least_lines(
    units: Sequence[float], low: Sequence[float], high: Sequence[float], need: float
) -> float:
    """min sum u p, where the product of the p is at least `need` and low <= p <= high."""
    if len(units) == 1:
        return units[0] * low[0]
    if all(unit <= 0 for unit in units):
        return 0.0
    # p_k = clip(t / u_k), one multiplier t for all: the relaxation without whole numbers.
    a, b = 1e-12, 1e30
    for _ in range(64):
        t = math.sqrt(a * b)
        if math.prod(_clipped(t, units, low, high)) < need:
            a = t
        else:
            b = t
    p = _clipped(b, units, low, high)
    if math.prod(p) < need * (1 - 1e-9):
        return math.inf
    return sum(u * x for u, x in zip(units, p, strict=True)) * (1 - 1e-12)


def _clipped(
    t: float, units: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> list[float]:
    return [
        h if u <= 0 else min(h, max(w, t / u)) for u, w, h in zip(units, low, high, strict=True)
    ]


def _alone(family: HostFamily, n: int, hosts: int) -> float:
    """What n of all hosts send at least for one family, whichever hosts they are.

    They touch as few groups as they can and fill all of these but one: phi is concave.  Hosts in
    no group are taken first, as far as that helps.  Zero where groups overlap or differ in size.
    """
    members = [host for group in family.groups for host in group.hosts]
    sizes = {len(group.hosts) for group in family.groups}
    if family.pattern == "edges" or len(set(members)) != len(members) or len(sizes) != 1:
        return 0.0
    size = sizes.pop()
    phi = _phi(family, size)
    outside = hosts - len(members)
    inside = range(max(0, n - outside), min(n, len(members)) + 1)
    return min((phi(t % size) for t in inside[:size]), default=0.0)
