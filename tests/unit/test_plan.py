"""Plans: one rank's groups, their names and waves; what they cost in the largest worlds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commkit import plan
from commkit.errors import LayoutError
from commkit.layout import from_lists, from_mesh, parse
from commkit.plan import Generations, group_name, make


@pytest.fixture(scope="module")
def cases(repository):
    text = (repository / "tests" / "cases" / "group-creation.json").read_text()
    return {case["id"]: case for case in json.loads(text)}


# --- Names ---------------------------------------------------------------------------------------


def test_grp_01_ranks_that_list_groups_in_another_order_give_them_the_same_names(cases):
    data = cases["GRP-01"]["input"]["data"]
    names = []
    for order in ("even_ranks_create", "odd_ranks_create"):
        made = from_lists({"own": data[order]}, data["world_size"])
        plans = [make(made, rank, Generations()) for rank in range(4)]
        names.append({group.ranks: group.name for p in plans for group in p.groups})
    assert names[0] == names[1]
    assert len(set(names[0].values())) == 2


def test_grp_01_a_declared_layout_tells_the_two_orders_apart(cases):
    data = cases["GRP-01"]["input"]["data"]
    digests = [
        from_lists({"own": data[order]}, 4).digest()
        for order in ("even_ranks_create", "odd_ranks_create")
    ]
    assert digests[0] != digests[1]


def test_grp_02_a_name_does_not_depend_on_what_its_ranks_did_elsewhere(cases):
    counted = {rank: Generations() for rank in range(4)}
    named = {}
    for step in cases["GRP-02"]["input"]["data"]["steps"]:
        for rank in step["callers"]:
            name = counted[rank].named("", tuple(step["ranks"]))
            named.setdefault(tuple(step["ranks"]), set()).add(name)
    assert all(len(names) == 1 for names in named.values())
    assert len(named) == 2


def test_grp_07_two_groups_never_share_a_name(cases):
    for row in cases["GRP-07"]["input"]["data"]:
        counted = Generations()
        names = [counted.named(group["tag"], group["ranks"]) for group in row]
        assert len(set(names)) == 2, row


def test_grp_07_names_do_not_depend_on_the_hash_seed():
    script = (
        "from commkit import plan, layout;"
        "made = layout.parse('tp=2,cp=2', 16, families='megatron');"
        "print(plan.make(made, 3, plan.Generations()))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(seen) == 1


def test_a_name_is_this_text():
    # Ranks of two versions of commkit never meet in one job, but a name's form is known to tools.
    assert group_name("tp", (0, 1), 0) == "ck:tp:04f96560a741c2aa0434ae96:0"


@given(
    st.text(max_size=80),
    st.lists(st.integers(0, 2**31), min_size=1, max_size=9, unique=True),
    st.integers(0, 10**10 - 1),
)
@settings(deadline=None)
def test_names_are_short_and_safe_whatever_the_family_is_called(family, ranks, generation):
    name = group_name(family, ranks, generation)
    assert len(name) <= 64
    assert re.fullmatch(r"ck:[A-Za-z0-9%._~-]*:[0-9a-f]{24}:[0-9]+", name)


@given(st.data())
@settings(deadline=None)
def test_different_groups_have_different_names(data):
    one = st.tuples(
        st.text("ab/:%0", max_size=4),
        st.lists(st.integers(0, 130), min_size=1, max_size=4, unique=True).map(tuple),
        st.integers(0, 12),
    )
    first, second = data.draw(one), data.draw(one)
    assert (first == second) == (group_name(*first) == group_name(*second))


def test_a_generation_out_of_bounds_is_refused():
    for generation in (-1, 10**10):
        with pytest.raises(LayoutError, match="generation"):
            group_name("tp", (0,), generation)


def test_generations_count_each_list_under_each_family():
    counted = Generations()
    assert [counted.next("a", r) for r in ((0, 1), (0, 1), (1, 0), (0, 1))] == [0, 1, 0, 2]
    assert counted.next("b", (0, 1)) == 0
    assert counted.next("a", [0, 1]) == 3  # a list is its ranks


def test_generations_are_given_out_once_among_threads():
    counted, got = Generations(), []

    def use():
        got.extend(counted.next("x", (0, 1)) for _ in range(500))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(4000))


# --- Plans ---------------------------------------------------------------------------------------


def test_a_plan_holds_the_groups_of_its_rank_in_the_order_of_the_families():
    made = parse("tp=2,dp=2,pp=2", 8, families="pp,tp,embd,dp")
    found = make(made, 5, Generations())
    assert [(g.family, g.ranks, g.index) for g in found.groups] == [
        ("pp", (1, 5), 1),
        ("tp", (4, 5), 1),
        ("embd", (1, 5), 1),
        ("dp", (5, 7), 0),
    ]
    assert found.waves == ((0,), (1,), (2,), (3,))
    assert (found.rank, found.world_size) == (5, 8)
    assert (found.digest, found.description) == (made.digest(), made.summary())
    assert [g.name for g in found.groups] == [
        group_name(g.family, g.ranks, 0) for g in found.groups
    ]


def test_a_rank_without_a_group_in_a_wave_keeps_the_waves_place():
    made = parse("tp=1,dp=1,pp=4", 4, families="pp,embd,pos_embd,tp")
    assert make(made, 2, Generations()).waves == ((0,), (), (), (1,))
    assert make(made, 0, Generations()).waves == ((0,), (1,), (2,), (3,))


def test_the_second_plan_of_a_process_has_other_names():
    made, counted = parse("tp=2", 4), Generations()
    first, second = make(made, 0, counted), make(made, 0, counted)
    assert [g.name for g in first.groups] == [
        group_name(g.family, g.ranks, 0) for g in first.groups
    ]
    assert [g.name for g in second.groups] == [
        group_name(g.family, g.ranks, 1) for g in second.groups
    ]


def test_one_list_twice_in_a_family_is_two_groups():
    made = from_lists({"pair": [[0, 1], [0, 1]]}, 2, overlap="pair")
    plans = [make(made, rank, Generations()) for rank in (0, 1)]
    assert [g.name for g in plans[0].groups] == [g.name for g in plans[1].groups]
    assert len({g.name for g in plans[0].groups}) == 2


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_has_no_plan(rank):
    with pytest.raises(LayoutError, match=f"rank {rank} is outside a world of 8"):
        make(parse("tp=2", 8), rank, Generations())


# --- What holds for every layout -----------------------------------------------------------------

sizes = st.integers(1, 4)


@st.composite
def grids(draw):
    names = draw(st.permutations(["tp", "cp", "ep", "dp", "pp"]))
    tp, cp, dp, pp = (draw(sizes) for _ in range(4))
    text = f"tp={tp},cp={cp},dp={dp},pp={pp}"
    extra = draw(st.integers(0, 3))
    return parse(
        text,
        tp * cp * dp * pp + extra,
        order="-".join(names),
        families="tp,cp,dp,pp,embd,pos_embd,tp-dp,dp-cp,mp,tp-dp-cp",
        allow_partial=True,
    )


@st.composite
def meshes(draw):
    shape = draw(st.lists(sizes, min_size=1, max_size=4))
    world = 1
    for size in shape:
        world *= size
    return from_mesh(shape, None, world)


@st.composite
def lists(draw):
    world = draw(st.integers(1, 12))
    group = st.lists(st.integers(0, world - 1), min_size=1, max_size=6, unique=True)
    names = draw(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3, unique=True))
    return from_lists(
        {name: draw(st.lists(group, min_size=1, max_size=8)) for name in names},
        world,
        overlap=names,
    )


@given(st.one_of(grids(), meshes(), lists()))
@settings(deadline=None, max_examples=150)
def test_of_and_iteration_and_the_counts_agree(made):
    for family in made.families.values():
        groups = list(family)
        assert len(groups) == family.count == len(family)
        assert family.sizes == (min(map(len, groups)), max(map(len, groups)))
        for rank in range(made.world_size):
            assert list(family.of(rank)) == [group for group in groups if rank in group]
        members = [rank for group in groups for rank in group]
        assert family.disjoint == (len(set(members)) == len(members)) == (family.waves == 1)


@given(st.one_of(grids(), meshes(), lists()))
@settings(deadline=None, max_examples=150)
def test_ranks_that_create_wave_after_wave_all_finish(made):
    plans = [make(made, rank, Generations()) for rank in range(made.world_size)]
    count = len(plans[0].waves)
    for p in plans:
        assert len(p.waves) == count
        assert [i for wave in p.waves for i in wave] == list(range(len(p.groups)))
        assert all(len(wave) <= 1 for wave in p.waves)
        assert (p.digest, p.description) == (plans[0].digest, plans[0].description)
    for k in range(count):
        here = [(p.rank, p.groups[i]) for p in plans for i in p.waves[k]]
        # Whoever is in a group of this wave has that very group in it: by name, and complete.
        for name in {group.name for _, group in here}:
            ranks = [(rank, group) for rank, group in here if group.name == name]
            assert {group.ranks for _, group in ranks} == {ranks[0][1].ranks}
            assert sorted(ranks[0][1].ranks) == [rank for rank, _ in ranks]
            assert all(group.ranks[group.index] == rank for rank, group in ranks)
    assert sum(len(p.groups) for p in plans) == sum(
        len(group) for family in made.families.values() for group in family
    )


@given(st.one_of(grids(), meshes(), lists()))
@settings(deadline=None, max_examples=100)
def test_the_same_groups_as_lists_have_the_same_digest(made):
    again = from_lists(
        {name: list(family) for name, family in made.families.items()},
        made.world_size,
        overlap=list(made.families),
    )
    assert again.describe() == made.describe()
    assert again.digest() == made.digest()


@given(lists(), lists())
@settings(deadline=None, max_examples=200)
def test_equal_descriptions_are_equal_groups(one, other):
    def content(made):
        return made.world_size, {name: list(f) for name, f in made.families.items()}

    same = content(one) == content(other) and [*one.families] == [*other.families]
    assert (one.describe() == other.describe()) == same
    assert (one.digest() == other.digest()) == same


# --- Large worlds --------------------------------------------------------------------------------

LARGEST = 98_304


def _traced(call):
    """(steps of the interpreter, peak bytes) of `call`: steps do not depend on the machine."""
    steps = 0

    def count(_frame, _event, _argument):
        nonlocal steps
        steps += 1
        return count

    tracemalloc.start()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return steps, peak


def _everything():
    made = parse("tp=8,cp=2,ep=8,pp=16", LARGEST, families="megatron")
    make(made, LARGEST - 1, Generations())


def test_a_plan_of_the_largest_world_costs_one_rank_its_own_part():
    steps, peak = _traced(_everything)
    # One of its groups, the optimizer's, has every rank of the world.
    assert peak < 100_000_000
    assert steps < 4 * LARGEST


def test_small_groups_cost_no_more_in_a_large_world_than_in_a_small_one():
    def plan_of(world):
        made = parse("tp=8,cp=2,ep=2,pp=2", world, families="tp,cp,ep,etp,tp-ep,pp,embd,mp")
        return lambda: make(made, world - 1, Generations())

    small, _ = _traced(plan_of(64))
    large, peak = _traced(plan_of(LARGEST))
    assert large <= small
    assert peak < 200_000


def test_lists_of_the_largest_world_fit_too():
    groups = [range(first, first + 8) for first in range(0, LARGEST, 8)]
    made = None

    def build():
        nonlocal made
        made = from_lists({"tp": groups, "world": [None]}, LARGEST)
        make(made, 77, plan.Generations())

    _, peak = _traced(build)
    assert peak < 100_000_000
    assert made.describe() == parse("tp=8", LARGEST, families="tp").describe() + (
        "; 'world': 98304x1 from 1"
    )
