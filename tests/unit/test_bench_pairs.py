"""Tournaments, outliers, who is to blame, groups by a rule, dry runs: no ranks are needed."""

from __future__ import annotations

import itertools
import random

import pytest

from commkit.bench import blame, dryrun, preflight, teams, tournament
from commkit.bench.agreement import Hello
from commkit.bench.arguments import plan
from commkit.bench.blame import Progress
from commkit.bench.outliers import common, outliers
from commkit.bench.pairs import chosen
from commkit.errors import LayoutError, UsageError
from commkit.measure.statistics import median_interval, precision, skew


@pytest.mark.parametrize("n", [*range(10), 33, 64, 257])
def test_everybody_meets_everybody_once_in_rounds_that_share_nobody(n):
    rounds = tournament.everybody(n)
    assert len(rounds) == (0 if n < 2 else n - 1 + n % 2)
    met = [pair for some in rounds for pair in some]
    assert sorted(met) == list(itertools.combinations(range(n), 2))
    for some in rounds:
        players = [player for pair in some for player in pair]
        assert len(players) == len(set(players))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9])
def test_a_ring_and_a_bisection_take_a_fixed_number_of_rounds(n):
    ring = tournament.ring(n)
    edges = {tuple(sorted((i, (i + 1) % n))) for i in range(n)}
    assert {pair for some in ring for pair in some} == edges
    assert len(ring) <= 3
    for some in [*ring, *tournament.bisection(n)]:
        players = [player for pair in some for player in pair]
        assert len(players) == len(set(players))
    assert tournament.bisection(n) == (tuple((i, i + n // 2) for i in range(n // 2)),)


def hellos(*hosts):
    return [Hello(h, h, 1, "cpu", None, None, 0, "", {}, {}) for h in hosts]


def test_rails_pair_ranks_of_equal_place_on_every_two_hosts():
    rounds = chosen("rail", hellos("a", "a", "b", "b", "c", "c"))
    assert len(rounds) == 3
    assert sorted(pair for some in rounds for pair in some) == [
        (0, 2),
        (0, 4),
        (1, 3),
        (1, 5),
        (2, 4),
        (3, 5),
    ]
    assert chosen("hosts", hellos("a", "a", "b")) == (((0, 2),),)
    with pytest.raises(UsageError, match="pairs --hosts: expected at least two hosts, found one"):
        chosen("hosts", hellos("a", "a"))


def test_a_slow_pair_and_a_slow_rank_are_found_and_noise_is_not():
    draw = random.Random(1)
    values = {pair: draw.gauss(10, 0.2) for pair in itertools.combinations(range(8), 2)}
    assert outliers(values, low_is_bad=True) == outliers(values, low_is_bad=False) == []
    values[2, 5] = 4.0
    (one,) = outliers(values, low_is_bad=True)
    assert (one.pair, one.value) == ((2, 5), 4.0)
    assert common([one], values) == []
    for other in range(8):
        if other != 3:
            values[min(3, other), max(3, other)] = 5.0
    found = outliers(values, low_is_bad=True)
    assert len(found) == 8
    assert common(found, values) == [(3, 7, 7)]
    assert found[0].pair == (2, 5), "the worst comes first"


def test_ranks_are_grouped_by_host_by_rail_and_by_number():
    some = hellos("a", "a", "b", "b")
    assert teams.split("split-by-host", some) == ((0, 1), (2, 3))
    assert teams.split("rail", some) == ((0, 2), (1, 3))
    assert teams.split("/2", some) == ((0, 1), (2, 3))
    assert teams.split("%2", some) == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("by-colour", "--groups by-colour: expected split-by-host, rail, /N or %N"),
        ("/0", "--groups /0: expected"),
        ("/3", "/3: groups of 1 and of 3 ranks: expected groups of one size"),
    ],
)
def test_groups_that_cannot_be_compared_are_refused(rule, expected):
    with pytest.raises(UsageError, match=expected):
        teams.split(rule, hellos("a", "a", "b", "b"))


def test_a_family_that_a_layout_lacks_is_named_with_those_it_has():
    assert teams.family("tp=2,dp=2", "dp", 4) == ((0, 2), (1, 3))
    with pytest.raises(UsageError, match="--layout tp=2,dp=2 has no family 'pp'; it has .*tp"):
        teams.family("tp=2,dp=2", "pp", 4)
    with pytest.raises(LayoutError):
        teams.family("tp=3", "tp", 4)


def test_the_rank_that_is_behind_is_to_blame():
    def at(step, calls):
        return Progress(step, calls, "size 64: timing in place", "train.py:12")

    assert blame.verdict([at(5, 3), at(5, 2), at(5, 3)]) == (
        "did not finish: rank 1 (size 64: timing in place, call 2 of a batch, at train.py:12)"
    )
    assert blame.verdict([at(5, 3), at(4, 9), at(4, 9)]).startswith("did not finish: rank 1-2 (")
    assert blame.verdict([at(5, 3), None, at(5, 3), None]) == (
        "did not finish and does not answer: rank 1,3"
    )
    assert "none is behind" in blame.verdict([at(5, 3), at(5, 3)])


def card(host, name, port=0, **environment):
    return preflight.Card(host, name, f"10.0.0.{host}", port, {"torch": "2.13"}, environment)


def test_a_host_that_cannot_reach_another_is_named_with_its_ranks():
    cards = [card(0, "a", 1), card(0, "a"), card(1, "b", 2), card(2, "c", 3, NCCL_ALGO="Ring")]
    lines, code = preflight.report(cards, [[[1, "no answer in 3 s"]], [], [], []], 3.0)
    assert code == 3
    assert lines[-1] == (
        "commkit: a (ranks 0-1) cannot reach b (rank 2) at 10.0.0.1:2: no answer in 3 s"
    )
    assert "# warning: NCCL_ALGO is unset on rank 0, Ring on rank 3" in lines
    lines, code = preflight.report(cards, [[], [], [], []], 0.5)
    assert (code, lines[-1]) == (0, "# every host reaches every other (0.5 s)")


def test_in_large_worlds_each_host_tries_a_number_that_grows_with_the_logarithm():
    assert preflight.targets(3, range(5)) == [0, 1, 2, 4]
    many = range(4096)
    assert preflight.targets(4095, many) == sorted((4095 + (1 << k)) % 4096 for k in range(12))


def test_a_dry_run_names_memory_and_time_without_starting_anything():
    wide = plan(collective=("all_to_all", "all_reduce"), minbytes="1G", maxbytes="1G", iters=10)
    lines = dryrun.lines(wide, 8)
    assert "8 ranks" in lines[0]
    # Both sides and the copy from which it sends in place; an all_reduce has no copy.
    assert "3072.0 MiB" in lines[1]
    assert "2048.0 MiB" in lines[2]
    # 2 placements of 12 calls of 1 GiB times 7/8 at 1 GB/s, and verification on one core.
    call = (1 << 30) * 7 / 8 / 1e9
    seconds = float(lines[1].split("about ")[1].split()[0])
    assert seconds == pytest.approx(2 * (12 * call + (1 << 28) * 60e-9), rel=0.01)


def test_a_median_has_an_interval_from_six_values_on_and_it_covers_95_percent():
    assert median_interval([1.0] * 5) is None
    assert median_interval([3, 1, 2, 6, 5, 4]) == (1, 6)
    draw = random.Random(7)
    inside = 0
    for _ in range(400):
        low, high = median_interval([draw.expovariate(1) for _ in range(25)])
        inside += low <= 0.6931 <= high
    assert inside >= 0.93 * 400
    assert precision([2.0] * 20) == 0
    assert precision([]) is None
    assert skew([1.0, 2.0, 3.0]) == 1.0
    assert skew([5.0]) == 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"group": "dp"}, "--group dp: expected --layout too"),
        ({"layout": "tp=2"}, "--layout tp=2: expected --group FAMILY or --concurrent"),
        ({"layout": "tp=2", "groups": "rail"}, "--groups rail splits the world by a rule"),
        ({"layout": "a=2", "concurrent": "tp"}, "--concurrent tp: 'tp': expected FAMILY:COLL"),
        ({"layout": "a=2", "concurrent": "tp:reduce"}, "expected two or more"),
        ({"precision": "0%"}, "--precision 0%: expected a percentage"),
        ({"precision": "nan"}, "--precision nan: expected a percentage"),
        ({"agg_iters": 0}, "-m 0: expected at least 1"),
        ({"cudagraph": 2, "agg_iters": 2}, "-G 2: a graph has its own order"),
        ({"root": -1}, "-r -1: expected at least 0"),
        ({"budget": 0.0}, "--budget 0: expected seconds"),
        ({"link_speed": -1.0}, "--link-speed -1: expected GB/s"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, expected):
    with pytest.raises(UsageError, match=expected):
        plan(**flags)
