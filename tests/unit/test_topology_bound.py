"""The lower bound is one, against every subset of small grids and every partition that is found."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commkit.topology.bound import EXACT, LowerBounds, loomis_whitney
from commkit.topology.grid import grids
from commkit.topology.traffic import Demand, HostFamily, HostGroup

PATTERNS = ("ring", "line", "loop", "pairs", "tree")


def grid_demand(axes):
    """axes: (size, pattern, bytes); the first is the fastest."""
    hosts = math.prod(size for size, _, _ in axes)
    families, stride = [], 1
    for k, (size, pattern, amount) in enumerate(axes):
        groups = tuple(
            HostGroup(tuple(range(first, first + size * stride, stride)), amount, (0,))
            for first in range(hosts)
            if first // stride % size == 0
        )
        if size > 1:
            families.append(HostFamily(f"axis{k}", pattern, groups))
        stride *= size
    return Demand(hosts, tuple(families))


def least_egress(demand, n):
    """By trying every set of n hosts."""
    edges = list(demand.edges())
    best = math.inf
    for some in itertools.combinations(range(demand.hosts), n):
        inside = set(some)
        best = min(best, sum(w for a, b, w in edges if a in inside and b not in inside))
    return best


axis = st.tuples(st.integers(2, 4), st.sampled_from(PATTERNS), st.sampled_from((1.0, 2.5, 9.0)))


@settings(max_examples=60, deadline=None)
@given(
    axes=st.lists(axis, min_size=1, max_size=3).filter(
        lambda a: math.prod(x for x, _, _ in a) <= 12
    )
)
def test_no_set_of_hosts_sends_less(axes):
    demand = grid_demand(axes)
    bounds = LowerBounds(demand)
    for n in range(demand.hosts + 1):
        assert bounds.egress(n) <= least_egress(demand, n) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("axes", "n"),
    [
        ([(4, "ring", 9.0), (4, "loop", 1.0)], 4),
        ([(6, "ring", 3.0), (2, "line", 1.0)], 4),
        ([(4, "pairs", 2.0), (3, "ring", 3.0)], 6),
    ],
)
def test_on_two_axes_it_is_reached(axes, n):
    demand = grid_demand(axes)
    assert LowerBounds(demand).egress(n) == pytest.approx(least_egress(demand, n))


def test_three_axes_with_an_all_to_all_are_bounded_by_whole_lines():
    """32 of EP8 x EDP8 x PP4: whole expert groups, two by two of the rest."""
    demand = grid_demand([(8, "pairs", 12 / 7), (8, "ring", 4.0), (4, "loop", 1.2)])
    assert LowerBounds(demand).egress(32) == pytest.approx(8 * (2 * 4.0 + 2 * 2.4))


@settings(max_examples=40, deadline=None)
@given(axes=st.lists(axis, min_size=2, max_size=3), n=st.integers(1, 60))
def test_the_inequality_for_large_sets_is_never_above_the_recursion(axes, n):
    """Both bound the same minimum, which the recursion reaches on two axes."""
    if len(axes) == 2:
        demand = grid_demand(axes)
        if n < demand.hosts:
            units = []
            for size, pattern, amount in axes:
                unit = amount * {"pairs": size - 1, "tree": 2}.get(pattern, 1)
                units.append((size, unit * (2 if pattern == "loop" and size > 2 else 1)))
            assert loomis_whitney(units, n, demand.hosts) <= LowerBounds(demand).egress(n) * (
                1 + 1e-9
            )


def test_large_groups_are_bounded_too():
    demand = grid_demand([(192, "ring", 10.9), (8, "loop", 1.2)])
    bounds = LowerBounds(demand)
    assert EXACT < 256
    # 32 columns of all 8: what leaves is 8 rows.
    assert 0 < bounds.egress(256) <= 8 * 10.9 * (1 + 1e-9)
    assert bounds.egress(0) == bounds.egress(1536) == 0


def test_a_grid_is_recovered_from_its_lines():
    demand = grid_demand([(3, "ring", 1.0), (4, "pairs", 1.0), (2, "line", 1.0)])
    (grid,) = grids(demand)
    assert grid.axes == (3, 4, 2)
    assert len(set(zip(*grid.at, strict=True))) == 24


def test_copies_that_do_not_talk_are_an_axis():
    pair = tuple(HostGroup((i, i + 4), 1.0, (0,)) for i in range(4))
    (grid,) = grids(Demand(8, (HostFamily("dp", "ring", pair),)))
    assert grid.axes == (2, 4)


def test_groups_that_are_no_lines_have_no_grid_and_a_bound_each():
    groups = (HostGroup((0, 1, 2), 1.0, (0,)), HostGroup((2, 3), 1.0, (0,)))
    demand = Demand(4, (HostFamily("odd", "ring", groups),))
    assert grids(demand) == []
    assert LowerBounds(demand).egress(2) == 0
    whole = Demand(
        6,
        (
            HostFamily(
                "a", "ring", (HostGroup((0, 1, 2), 1.0, (0,)), HostGroup((3, 4, 5), 1.0, (0,)))
            ),
            HostFamily("b", "edges", (HostGroup((0, 3), 0.0, (0,), ((0, 3, 2.0),)),)),
        ),
    )
    assert LowerBounds(whole).egress(2) == 1.0
