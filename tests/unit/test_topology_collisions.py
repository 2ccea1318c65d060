"""How full a hash fills the fullest uplink: against enumeration, known values and the binomial."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from commkit.topology.collisions import at_most, conflict, expected_fullest, expected_time


@pytest.mark.parametrize(("flows", "uplinks"), [(1, 4), (4, 2), (6, 3), (5, 4), (7, 2)])
def test_small_numbers_are_those_of_every_way_to_throw(flows, uplinks):
    ways = list(itertools.product(range(uplinks), repeat=flows))
    fullest = [max(way.count(u) for u in range(uplinks)) for way in ways]
    for limit in range(flows + 1):
        share = sum(f <= limit for f in fullest) / len(ways)
        assert at_most(flows, uplinks, limit) == pytest.approx(share)
    assert expected_fullest(flows, uplinks) == pytest.approx(sum(fullest) / len(ways), abs=1e-5)


@pytest.mark.parametrize(
    ("flows", "one", "two"), [(4, 0.175, 0.004), (8, 0.612, 0.046), (16, 0.990, 0.358)]
)
def test_the_published_collision_probabilities_on_32_uplinks(flows, one, two):
    """Also with uplinks that carry two flows each, as MegaScale splits its switches' ports."""
    assert conflict(flows, 32) == pytest.approx(one, abs=0.01)
    assert conflict(flows, 32, 2) == pytest.approx(two, abs=0.005)


@pytest.mark.parametrize(("flows", "uplinks"), [(60, 32), (200, 16), (300, 64), (90, 8), (100, 5)])
def test_many_flows_agree_with_throwing_them(flows, uplinks):
    draw = random.Random(1)
    times = 3000
    found = []
    for _ in range(times):
        count = [0] * uplinks
        for u in draw.choices(range(uplinks), k=flows):
            count[u] += 1
        found.append(max(count))
    mean = sum(found) / times
    spread = math.sqrt(sum((f - mean) ** 2 for f in found) / times / times)
    assert abs(expected_fullest(flows, uplinks) - mean) < 5 * spread + 0.01
    for limit in sorted(set(found)):
        share = sum(f <= limit for f in found) / times
        assert at_most(flows, uplinks, limit) == pytest.approx(share, abs=0.05)


def test_two_uplinks_are_the_binomial():
    for flows, limit in ((30, 17), (101, 55), (400, 210)):
        inside = sum(math.comb(flows, k) for k in range(flows - limit, limit + 1)) / 2**flows
        assert at_most(flows, 2, limit) == pytest.approx(inside, abs=1e-6)


def test_the_slowest_of_several_groups_is_their_maximum():
    # Each of 2 groups has 2 flows over 2 uplinks: together on one with probability 1/2.
    assert expected_time([(2, 2, 1.0)] * 2) == pytest.approx(1 + 3 / 4)
    # One group at 1 or 2 s, another at 1.5 or 3 s.
    expected = (1.5 + 2 + 3 + 3) / 4
    assert expected_time([(2, 2, 1.0), (2, 2, 1.5)]) == pytest.approx(expected)


def test_nothing_is_faster_than_the_floor():
    assert expected_time([(2, 2, 1.0)], floor=5.0) == 5.0
    assert expected_time([(2, 2, 1.0)], floor=1.5) == pytest.approx(1.75)
    assert expected_time([], floor=0.5) == 0.5


def test_the_ends_are_exact():
    assert at_most(5, 4, 5) == 1.0
    assert at_most(9, 4, 2) == 0.0
    assert at_most(0, 4, 0) == 1.0
    assert expected_fullest(7, 1) == 7.0
    assert expected_fullest(1, 32) == 1.0
