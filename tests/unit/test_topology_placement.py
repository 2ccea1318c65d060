"""Placements: permutations, never worse than what came in, indifferent to names, near the bound."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_topology_bound import PATTERNS, grid_demand

from commkit.errors import NoTopology, TopologyError, UsageError
from commkit.topology import baselines
from commkit.topology.fabric import Fabric, Host, leaf_spine
from commkit.topology.partition import Graph, Parts, bisect, cuts
from commkit.topology.placement import graph_of, place
from commkit.topology.score import OBJECTIVES, Scorer
from commkit.topology.seats import Layer, Seats, seats_of
from commkit.topology.traffic import Demand, Family, HostFamily, HostGroup, demand

CASES = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).resolve().parent.parent / "cases" / "placement.json").read_text()
    )
}
QUICK = settings(max_examples=15, deadline=None)


@st.composite
def jobs(draw):
    """A small job and seats for it, with or without a grid, links known or not."""
    axes = draw(
        st.lists(
            st.tuples(st.integers(1, 4), st.sampled_from(PATTERNS), st.sampled_from((1e9, 3e9))),
            min_size=1,
            max_size=3,
        )
    )
    wanted = grid_demand(axes)
    n = wanted.hosts
    shuffled = draw(st.permutations(range(n)))
    if draw(st.booleans()):  # no grid any more: a group loses a member
        families = tuple(
            HostFamily(
                f.name, f.pattern, (*f.groups[1:], HostGroup(f.groups[0].hosts[1:], 1.0, (0,)))
            )
            for f in wanted.families
        )
        wanted = Demand(n, families)
    leaves = draw(st.integers(1, 4))
    leaf = [draw(st.integers(0, leaves - 1)) for _ in range(n)]
    numbers = {}
    leaf = tuple(numbers.setdefault(g, len(numbers)) for g in leaf)
    groups = max(leaf) + 1
    timed = draw(st.booleans())
    links = {"uplinks": (4,) * groups, "rate": 5e10} if timed else {}
    layers = [Layer(leaf, **links)]
    if groups > 2 and draw(st.booleans()):
        up = tuple(g // 2 for g in leaf)
        links = {"uplinks": (2,) * (max(up) + 1), "rate": 5e10} if timed else {}
        layers.append(Layer(up, **links, price=2.0))
    return wanted, Seats(n, tuple(layers), 2.5e10 if timed else None), list(shuffled)


@QUICK
@given(job=jobs(), objective=st.sampled_from(list(OBJECTIVES)))
def test_a_placement_is_a_permutation_no_worse_than_what_was_given(job, objective):
    wanted, seats, given_order = job
    plan = place(wanted, seats, given=given_order, objective=objective)
    assert sorted(plan.host_of) == list(range(wanted.hosts))
    scorer = Scorer(wanted, seats, objective=objective)
    assert plan.given == scorer.score(given_order)
    assert plan.score == scorer.score(plan.host_of)
    assert scorer.goal(plan.score) <= scorer.goal(plan.given) * (1 + 1e-9)


@QUICK
@given(job=jobs())
def test_no_placement_beats_the_bound(job):
    wanted, seats, given_order = job
    plan = place(wanted, seats, given=given_order)
    for score in (plan.score, plan.given):
        for what in ("crossing", "fullest"):
            for sent, least in zip(getattr(score, what), getattr(plan.least, what), strict=True):
                assert sent >= least * (1 - 1e-9)


@QUICK
@given(job=jobs())
def test_the_same_question_has_the_same_answer(job):
    wanted, seats, given_order = job
    assert place(wanted, seats, given=given_order) == place(wanted, seats, given=given_order)


def fabric_of(sizes, names=None):
    fabric = leaf_spine(sizes, spines=4, uplinks=2, nic_gbps=200, uplink_gbps=400)
    if names is None:
        return fabric
    hosts = tuple(
        Host(name, host.nics, host.devices) for name, host in zip(names, fabric.hosts, strict=True)
    )
    return Fabric(hosts, fabric.switches, fabric.links)


@QUICK
@given(seed=st.integers(0, 1000), sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4))
def test_renaming_hosts_renames_the_answer(seed, sizes):
    n = sum(sizes)
    families = [Family("dp", (tuple(range(n)),), "all_reduce", 1e9)]
    wanted = demand(families, [1] * n)
    order = list(range(n))
    random.Random(seed).shuffle(order)
    names = [f"z{random.Random(seed + i).random()}" for i in range(n)]
    plain, renamed = fabric_of(sizes), fabric_of(sizes, names)
    ours = place(wanted, seats_of(plain.select(plain.hosts[i].name for i in order)))
    theirs = place(wanted, seats_of(renamed.select(names[i] for i in order)))
    assert ours.host_of == theirs.host_of
    assert ours.score == theirs.score


def test_whole_switches_reach_the_bound():
    wanted = grid_demand([(48, "ring", 10.9e9), (8, "loop", 1.2e9)])
    tor = tuple(i // 64 for i in range(384))
    plan = place(wanted, Seats(384, (Layer(tor),)))
    assert plan.gaps == pytest.approx((1.0,))
    assert plan.given.crossing[0] > 1.4 * plan.score.crossing[0]


def test_fragmented_switches_come_near_it():
    """As the benchmark has it, smaller; the benchmark's bar is 1.12 for 12,288 GPUs."""
    draw = random.Random(3)
    tor = tuple(sorted(draw.choices(range(14), weights=range(1, 15), k=384)))
    numbers = {}
    tor = tuple(numbers.setdefault(t, len(numbers)) for t in tor)
    wanted = grid_demand([(48, "ring", 10.9e9), (8, "loop", 1.2e9)])
    plan = place(wanted, Seats(384, (Layer(tor),)))
    assert plan.gaps[0] < 1.15


def test_a_contender_is_taken_where_it_is_better():
    wanted = Demand(
        4, (HostFamily("x", "edges", (HostGroup((0, 3), 0.0, (0,), ((0, 3, 5.0), (3, 0, 5.0))),)),)
    )
    seats = Seats(4, (Layer((0, 0, 1, 1)),))
    asked = []

    def contender(demand, seats):
        asked.append(demand.hosts)
        return [0, 2, 3, 1]

    plan = place(wanted, seats, others=[("mine", contender)])
    assert asked == [4] and plan.score.crossing == (0.0,)


def test_ranks_handed_out_in_order_of_arrival_are_put_right():
    """PLACE-01."""
    case = CASES["PLACE-01"]
    racks, bad = case["input"]["data"]["racks"], case["input"]["data"]["bad"]
    ranks = case["input"]["data"]["ranks"]
    ring = Demand(
        ranks, (HostFamily("ring", "ring", (HostGroup(tuple(range(ranks)), 1.0, (0,)),)),)
    )
    rack = tuple(r for r, size in enumerate(racks) for _ in range(size))
    seats = Seats(ranks, (Layer(rack),))
    given_order, seat = [0] * ranks, 0
    for some in bad:
        for rank in some:
            given_order[rank] = seat
            seat += 1
    plan = place(ring, seats, given=given_order)
    value = case["expected"]["value"]
    assert plan.given.crossing == (value["bad_ring_crossings"],)
    assert plan.score.crossing == (value["good_ring_crossings"],) == plan.least.crossing
    assert sorted(plan.host_of) == list(range(ranks))


def test_the_numbers_of_hosts_have_to_be_equal():
    wanted = grid_demand([(4, "ring", 1.0)])
    with pytest.raises(UsageError, match="the layout has 4 hosts, the allocation 3"):
        place(wanted, Seats(3, (Layer((0, 0, 1)),)))
    with pytest.raises(UsageError, match="no permutation"):
        place(wanted, Seats(4, (Layer((0, 0, 1, 1)),)), given=[0, 0, 1, 2])
    with pytest.raises(UsageError, match="expected time or bytes"):
        place(wanted, Seats(4, (Layer((0, 0, 1, 1)),)), objective="luck")


# --- Seats ---


def test_seats_follow_from_a_fabric():
    fabric = leaf_spine(
        4,
        4,
        2,
        rails=2,
        uplinks=2,
        leaves_per_pod=2,
        cores=2,
        core_links=1,
        nic_gbps=100,
        uplink_gbps=200,
        core_gbps=200,
    )
    seats = seats_of(fabric)
    leaf, pod = seats.layers
    assert leaf.group == tuple(i // 4 for i in range(16))
    assert pod.group == tuple(i // 8 for i in range(16))
    # Two spines, two cables to each, from the leaf of one rail.
    assert (leaf.uplinks, leaf.rate, leaf.sharing) == ((4,) * 4, 25e9, 1)
    # The spines of a pod serve both rails.
    assert (pod.uplinks, pod.sharing) == ((4, 4), 2)
    assert (seats.nic, leaf.price) == (12.5e9, 1.0)
    assert pod.price == pytest.approx(8 * 2 * 100 / (4 * 200))


def test_rails_that_meet_only_in_hosts_are_planned_like_others():
    fabric = leaf_spine(4, 2, 2, rails=4, rail_only=True, nic_gbps=400, uplink_gbps=400)
    (leaf,) = seats_of(fabric).layers
    assert (leaf.group, leaf.sharing, leaf.uplinks) == ((0,) * 4 + (1,) * 4, 1, (2, 2))


def test_a_leaf_for_all_rails_is_shared_by_them():
    fabric = leaf_spine(2, 2, 2, rails=4, rail_optimised=False, nic_gbps=400, uplink_gbps=400)
    assert seats_of(fabric).layers[0].sharing == 4


def test_a_host_without_a_switch_is_alone():
    fabric = leaf_spine(2, 2).select(["h00000", "elsewhere", "h00001", "h00002", "nowhere"])
    assert seats_of(fabric).layers[0].group == (0, 1, 0, 2, 3)


def test_a_fabric_without_any_of_the_hosts_is_an_error_of_its_own():
    with pytest.raises(NoTopology, match="no host of the job has a place"):
        seats_of(leaf_spine(2, 2).select(["a", "b"]))


def test_two_fabrics_are_no_place_for_one_job():
    fabric = leaf_spine(2, 4, leaves_per_pod=2)  # no cores
    with pytest.raises(TopologyError, match="h00000 and h00004 have no network in common"):
        seats_of(fabric)


def test_a_leaf_in_two_pods_is_refused():
    with pytest.raises(UsageError, match="in two groups of the next"):
        Seats(2, (Layer((0, 0)), Layer((0, 1))))


# --- What it is made of ---


@QUICK
@given(
    n=st.integers(2, 12),
    seed=st.integers(0, 99),
    clique=st.booleans(),
)
def test_moves_are_accounted_for_exactly(n, seed, clique):
    draw = random.Random(seed)
    edges = [(draw.randrange(n), draw.randrange(n), draw.random()) for _ in range(2 * n)]
    cliques = [(draw.sample(range(n), min(n, 4)), 0.5)] if clique else []
    graph = Graph.of(n, edges, cliques)
    distance = [[0.0 if a == b else 1.0 + (a // 2 != b // 2) for b in range(4)] for a in range(4)]
    where = [draw.randrange(4) for _ in range(n)]
    parts = Parts(graph, where, distance, lambda cut: 0.3 * max(0.0, cut - 1) ** 2)
    for _ in range(10):
        before = parts.cost()
        gained = parts.move(draw.randrange(n), draw.randrange(4))
        assert parts.cost() == pytest.approx(before - gained, abs=1e-9)
        assert parts.cut == pytest.approx(cuts(graph, parts.where, 4), abs=1e-9)
    parts.undo()
    assert parts.where == where
    before = parts.cost()
    sizes = [len(some) for some in parts.members]
    gained = parts.descend()
    assert gained >= 0 and parts.cost() == pytest.approx(before - gained, abs=1e-9)
    assert [len(some) for some in parts.members] == sizes


@QUICK
@given(n=st.integers(2, 16), seed=st.integers(0, 99))
def test_a_bisection_keeps_its_sizes_and_cuts_no_more(n, seed):
    draw = random.Random(seed)
    edges = [(draw.randrange(n), draw.randrange(n), 1.0) for _ in range(2 * n)]
    graph = Graph.of(n, edges, [(draw.sample(range(n), min(n, 5)), 0.5)])
    left = [draw.random() < 0.5 for _ in range(n)]
    better = bisect(graph, left)
    assert sum(better) == sum(left)
    assert sum(cuts(graph, better, 2)) <= sum(cuts(graph, left, 2)) + 1e-9


@QUICK
@given(job=jobs())
def test_every_baseline_is_a_permutation(job):
    wanted, seats, _ = job
    n = wanted.hosts
    names = [f"n{(7 * i) % 13}" for i in range(n)]
    for order in (
        baselines.greedy(wanted, seats),
        baselines.random_order(n, 3),
        baselines.natural_order(names),
        baselines.table_order([(5 * i) % 7 for i in range(n)]),
        baselines.launcher_order(n),
    ):
        assert sorted(order) == list(range(n))


def test_names_are_sorted_by_the_numbers_in_them():
    assert baselines.natural_order(["n10", "n9", "a2-1", "a10-0"]) == [2, 3, 1, 0]


def test_metis_is_a_contender_where_it_is_installed():
    pytest.importorskip("pymetis")
    wanted = grid_demand([(12, "ring", 3.0), (4, "loop", 1.0)])
    seats = Seats(48, (Layer(tuple(i // 10 for i in range(48))),))
    assert sorted(baselines.metis(wanted, seats)) == list(range(48))


def test_the_graph_has_both_directions_of_everything():
    wanted = grid_demand([(3, "ring", 2.0), (4, "pairs", 1.0)])
    graph = graph_of(wanted)
    outside = cuts(graph, [i % 2 for i in range(12)], 2)
    sent = sum(w for a, b, w in wanted.edges() if a % 2 != b % 2)
    assert outside == pytest.approx([sent, sent])
