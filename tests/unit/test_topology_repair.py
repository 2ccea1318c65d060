"""Lost hosts are replaced where it is cheap, and no survivor moves that was not allowed to."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_topology_bound import grid_demand

from commkit.errors import UsageError
from commkit.topology.repair import repair
from commkit.topology.score import Scorer
from commkit.topology.seats import Layer, Seats

RING = grid_demand([(8, "ring", 1.0)])


def test_a_spare_under_the_same_switch_is_taken():
    # Seats 0-3 and 8 under one leaf, 4-7 and 9 under another; seat 6 is lost.
    seats = Seats(10, (Layer((0, 0, 0, 0, 1, 1, 1, 1, 0, 1)),))
    fixed = repair(RING, seats, range(8), lost=[6], spares=[8, 9])
    assert fixed.host_of == (0, 1, 2, 3, 4, 5, 9, 7)
    assert fixed.moved == ()


def test_neighbours_that_are_lost_together_come_back_together():
    # Two spares under one new leaf, one elsewhere.
    seats = Seats(11, (Layer((0, 0, 0, 0, 1, 1, 1, 1, 2, 3, 3)),))
    fixed = repair(RING, seats, range(8), lost=[5, 6], spares=[8, 9, 10])
    assert set(fixed.host_of[5:7]) == {9, 10}


def test_a_swap_is_made_only_if_survivors_may_move():
    # The only spare is under leaf 0, the lost host's neighbours under leaf 1: 0 and its ring
    # neighbour 7 are at the border, so that moving one host along heals the ring.
    seats = Seats(9, (Layer((0, 0, 0, 0, 1, 1, 1, 1, 0)),))
    scorer = Scorer(RING, Seats(8, (Layer((0,) * 8),)))
    assert scorer.least.crossing == (0.0,)
    stay = repair(RING, seats, range(8), lost=[5], spares=[8])
    move = repair(RING, seats, range(8), lost=[5], spares=[8], most_moves=1)
    assert stay.moved == () and len(move.moved) == 1

    def crossing(host_of):
        leaf = seats.layers[0].group
        return sum(w for a, b, w in RING.edges() if leaf[host_of[a]] != leaf[host_of[b]])

    assert crossing(stay.host_of) == 4 and crossing(move.host_of) == 2


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), moves=st.integers(0, 3))
def test_seats_stay_distinct_and_survivors_mostly_stay(seed, moves):
    draw = random.Random(seed)
    wanted = grid_demand([(4, "pairs", 1.0), (3, "loop", 2.0)])
    total = 12 + draw.randint(1, 4)
    leaf = tuple(draw.randrange(4) for _ in range(total))
    order = draw.sample(range(total), total)
    host_of, spares = order[:12], order[12:]
    lost = draw.sample(host_of, draw.randint(0, len(spares)))
    fixed = repair(wanted, Seats(total, (Layer(_numbered(leaf)),)), host_of, lost, spares, moves)
    assert len(set(fixed.host_of)) == 12 and not set(fixed.host_of) & set(lost)
    stayed = [a == b for a, b in zip(host_of, fixed.host_of, strict=True)]
    changed = {i for i in range(12) if not stayed[i] and host_of[i] not in lost}
    assert changed == set(fixed.moved) and len(changed) <= moves


def _numbered(leaf):
    numbers = {}
    return tuple(numbers.setdefault(g, len(numbers)) for g in leaf)


@pytest.mark.parametrize(
    ("lost", "spares", "expected"),
    [
        ([1, 2], [8], "2 hosts are lost and 1 are spare"),
        ([1], [2], "neither lost nor in use"),
        ([99], [8], "lost: seat 99: expected 0 to 8"),
    ],
)
def test_what_does_not_fit_is_named(lost, spares, expected):
    seats = Seats(9, (Layer((0,) * 4 + (1,) * 5),))
    with pytest.raises(UsageError, match=expected):
        repair(RING, seats, range(8), lost, spares)
