"""Layouts: sizes and orders, what is inferred, what is refused and how; meshes and rank lists."""

from __future__ import annotations

import itertools
import json
import math
import pickle

import numpy as np
import pytest

from commkit import grids
from commkit.errors import LayoutError, LayoutTypeError, UsageError
from commkit.layout import from_lists, from_mesh, parse


@pytest.fixture(scope="module")
def cases(repository):
    text = (repository / "tests" / "cases" / "group-creation.json").read_text()
    return {case["id"]: case for case in json.loads(text)}


# --- Reported cases ------------------------------------------------------------------------------


def test_grp_05_ranks_of_any_integer_kind_become_ints(cases):
    class Tensor:  # what torch's has, for a test without torch
        def __init__(self, values):
            self.values = values

        def tolist(self):
            return self.values

    data = cases["GRP-05"]["input"]["data"]
    given = [Tensor([0, 1]), np.array([0, 1]), range(2), {1, 0}, ("0", "1")]
    assert len(given) == len(data)
    for ranks, expected in zip(given, cases["GRP-05"]["expected"]["value"], strict=True):
        if expected == "TypeError":
            with pytest.raises(TypeError, match=r"family 'a', group 0: '0' \(str\) is no rank"):
                from_lists({"a": [ranks]}, 4)
            continue
        (group,) = from_lists({"a": [ranks]}, 4)["a"]
        assert list(group) == expected
        assert all(type(rank) is int for rank in group)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (0, r"group 0: rank 1 is there more than once in \[1-2,1\]|in \[1,1-2\]"),
        (1, r"group 0: rank 7 is outside a world of 4: expected 0 to 3 in \[0,7\]"),
        (2, r"group 0: rank -1 is outside a world of 4"),
        (3, r"group 0: no rank in it"),
    ],
)
def test_grp_04_odd_lists_are_value_errors_that_name_the_rank(cases, row, message):
    ranks = cases["GRP-04"]["input"]["data"][row]["ranks"]
    with pytest.raises(ValueError, match=message) as caught:
        from_lists({"x": [ranks]}, 4)
    assert isinstance(caught.value, UsageError)


def test_grp_04_none_is_all_ranks(cases):
    ranks = cases["GRP-04"]["input"]["data"][4]["ranks"]
    assert list(from_lists({"x": [ranks]}, 4)["x"]) == [(0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (0, r"tp\*pp\*dp = 2\*3\*1 = 6, but the world size is 8"),
        (1, None),
        (2, None),
        (3, r"tp\*dp = 2\*1 = 2, but the world size is 4; allow_partial=True leaves"),
        (4, r"a world of 8 is not divisible by tp = 3, so no dp fits"),
        (5, r"tp=0: expected an integer of at least 1"),
    ],
)
def test_grp_13_sizes_that_do_not_make_the_world_show_product_and_world(cases, row, error):
    sizes = dict(cases["GRP-13"]["input"]["data"][row])
    world = sizes.pop("world")
    text = ",".join(f"{name}={size}" for name, size in sizes.items())
    if error is not None:
        with pytest.raises(LayoutError, match=error):
            parse(text, world)
        return
    made = parse(text, world)
    assert set(made.families) == set(sizes)
    assert made["dp"].sizes == ((1, 1) if row == 1 else (4, 4))
    assert all(len(made[name].of(rank)) == 1 for name in sizes for rank in range(world))


def test_grp_13_a_mesh_smaller_than_the_world_needs_allow_partial():
    with pytest.raises(LayoutError, match=r"1 \* 2 = 2, but the world size is 4"):
        from_mesh((1, 2), ("dp", "tp"), 4)
    made = from_mesh((1, 2), ("dp", "tp"), 4, allow_partial=True)
    assert list(made["tp"]) == [(0, 1)]
    assert list(made["dp"]) == [(0,), (1,)]
    assert made["tp"].of(3) == ()
    with pytest.raises(LayoutError, match="8, but the world size is 4$"):
        from_mesh((2, 4), None, 4, allow_partial=True)


def test_grp_14_groups_of_different_sizes_and_declared_overlap(cases):
    data = cases["GRP-14"]["input"]["data"]
    with pytest.raises(LayoutError, match=r"'pp': rank 3 is in \[0,3\] and in \[1,3\]"):
        from_lists(data["groups"], data["world_size"])
    made = from_lists(data["groups"], data["world_size"], overlap=["pp"])
    assert made["tp"].sizes == (1, 3)
    assert made["tp"].disjoint
    assert not made["pp"].disjoint
    assert made["pp"].waves == 3
    assert made["pp"].of(3) == ((0, 3), (1, 3), (2, 3))


def test_grp_20_expert_parallel_repartitions_the_ranks_of_a_stage(cases):
    rows = []
    for row in cases["GRP-20"]["input"]["data"]:
        sizes = dict(row)
        rows.append((sizes.pop("world"), ",".join(f"{k}={v}" for k, v in sizes.items())))
    world, text = rows[0]
    made = parse(text, world)
    groups = list(made["ep"])
    assert [len(group) for group in groups] == [4] * 4
    stages = [set(stage) for stage in parse(text, world, families="tp-dp-cp")["tp-dp-cp"]]
    for stage in stages:
        inside = [set(group) for group in groups if set(group) <= stage]
        assert sum(map(len, inside)) == len(stage)
        assert set().union(*inside) == stage
    with pytest.raises(LayoutError, match=r"ep=3: 3 does not divide dp\*cp = 4$"):
        parse(rows[1][1], rows[1][0])
    with pytest.raises(
        LayoutError,
        match=r"8 does not divide dp\*cp = 4; with etp=1 a group of experts may span tp",
    ):
        parse(rows[2][1], rows[2][0])
    spanning = parse(rows[2][1] + ",etp=1", rows[2][0])
    assert list(spanning["ep"]) == [tuple(range(8)), tuple(range(8, 16))]


# --- parse() -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "world", "sizes"),
    [
        ("tp=2", 8, {"tp": 2, "dp": 4}),
        ("tp=2,dp=-1", 8, {"tp": 2, "dp": 4}),
        (" TP = 2 , pp=-1 , dp=2", 8, {"tp": 2, "pp": 2, "dp": 2}),
        ("tp=8", 8, {"tp": 8, "dp": 1}),
        ("", 4, {"dp": 4}),
        ("tp=1,cp=1,pp=1", 1, {"tp": 1, "cp": 1, "pp": 1, "dp": 1}),
        ("dp_replicate=2", 8, {"dp_replicate": 2, "dp_shard": 4}),
        ("dp_shard=2,tp=2", 8, {"tp": 2, "dp_shard": 2, "dp_replicate": 2}),
        ("dp_shard=-1,dp_replicate=2,dp=4,tp=2", 8, {"dp_shard": 2, "dp_replicate": 2, "tp": 2}),
    ],
)
def test_what_is_left_out_is_inferred(text, world, sizes):
    made = parse(text, world)
    for name, size in sizes.items():
        assert made[name].sizes == (size, size), name
        assert sorted(itertools.chain(*made[name])) == list(range(world))


def test_families_are_the_named_dimensions_unless_said_otherwise():
    assert [*parse("pp=2,tp=2", 8).families] == ["tp", "dp", "pp"]
    assert [*parse("pp=2,tp=2,ep=2", 8).families] == ["tp", "ep", "dp", "pp", "edp"]
    assert [*parse("tp=2", 8, families="dp, tp-dp").families] == ["dp", "tp-dp"]
    named = parse("tp=2", 8, families={"sync": "dp", "dp_gloo": "dp"})
    assert [*named.families] == ["sync", "dp_gloo"]
    assert list(named["sync"]) == list(named["dp_gloo"])


def test_a_family_is_found_by_any_of_its_words():
    made = parse("tp=2,cp=2,ep=2,dp=4,pp=2", 32, families="megatron")
    for word, name in {
        "dp_cp": "dp-cp",
        "cp-dp": "dp-cp",
        "pp-tp": "mp",
        "ep_dp": "edp",
        "etp-ep": "tp-ep",
        "tp_ep_pp": "tp-ep-pp",
        "ep_tp": "etp",
        "cp-tp-dp": "tp-dp-cp",
    }.items():
        assert made[word] is made.families[name], word
        assert word in made
    with pytest.raises(UsageError, match="no family 'dp-pp' in this layout: it has 'dp-cp', 'dp'"):
        made["dp-pp"]
    assert "dp-pp" not in made
    assert "nonsense" not in made


def test_hybrid_sharding_splits_data_parallelism_shards_being_neighbours():
    made = parse(
        "tp=2,dp_shard=2,dp_replicate=2,pp=2",
        16,
        families="dp_shard,dp_replicate,dp,dp_shard-tp",
    )
    assert made["dp_shard"].of(0) == ((0, 2),)
    assert made["dp_replicate"].of(0) == ((0, 4),)
    assert made["dp"].of(0) == ((0, 2, 4, 6),)
    assert made["dp_shard-tp"].of(5) == ((4, 5, 6, 7),)
    assert made.mesh_names == ("pp", "dp_replicate", "dp_shard", "tp")
    assert made.mesh_shape == (2, 2, 2, 2)
    # The same by a mesh, and with the halves put elsewhere by the order.
    mesh = from_mesh(made.mesh_shape, made.mesh_names, 16, families="dp_shard,dp_replicate")
    assert mesh["dp_shard"].describe() == made["dp_shard"].describe()
    other = parse("dp_shard=2,dp_replicate=4,tp=2", 16, order="dp_shard-tp-dp_replicate")
    assert other["dp_shard"].of(2) == ((2, 3),)


def test_sizes_of_one_are_groups_of_one_rank():
    made = parse("tp=1,cp=1,dp=4,pp=1", 4, families="megatron")
    assert list(made["tp"]) == [(0,), (1,), (2,), (3,)]
    assert list(made["embd"]) == list(made["pos_embd"]) == list(made["pp"])
    assert made["ep"].count == 4
    assert parse("tp=1,dp=4", 4).mesh_shape == (4, 1)


def test_words_of_the_order_may_be_dimensions_too():
    made = parse("tp=2,slice=2,dp=2", 8, order="tp-dp-slice", families="slice,slice-tp")
    assert made["slice"].of(1) == ((1, 5),)
    assert made["tp-slice"].of(0) == ((0, 1, 4, 5),)


def test_experts_stay_within_a_dimension_of_ones_own():
    made = parse("tp=2,slice=2,dp=2,ep=2", 8, order="tp-ep-dp-slice")
    assert list(made["ep"]) == [(0, 2), (1, 3), (4, 6), (5, 7)]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("tp=2,tp=4", {}, "tp is there more than once"),
        ("tp", {}, r"'tp' is no NAME=SIZE"),
        ("tp=2,,dp=4", {}, r"'' is no NAME=SIZE"),
        ("tp=2,", {}, r"'' is no NAME=SIZE"),
        ("tp=2;dp=4", {}, r"tp=2;dp=4: expected an integer"),
        ("tp=two", {}, "tp=two: expected an integer of at least 1 or -1"),
        ("tp=2.0", {}, "tp=2.0: expected an integer"),
        ("tp=1_0", {}, "tp=1_0: expected an integer"),
        ("tp=\u0663", {}, "expected an integer"),
        ("tp=" + "9" * 5000, {}, "expected an integer"),
        ("tp=2", {"families": 3}, "families 3: expected words"),
        ("tp=2", {"families": {"tp": 3}}, "family 3: expected a name"),
        ("tp=2", {"order": None}, "order None: expected text"),
        ("tp=-2", {}, "tp=-2: expected an integer"),
        ("ep=-1", {}, "ep=-1: expected an integer of at least 1"),
        ("tp=-1,dp=-1", {}, "tp and dp would both be what remains; give the size of one"),
        ("tp=-1", {}, "tp and dp would both be what remains"),
        ("zp=2", {}, "unknown dimension 'zp': expected one of tp, cp, dp, pp"),
        ("edp=2", {}, "edp is what etp and ep leave of a pipeline stage; leave it out"),
        ("tp=2,cp=2", {"order": "tp-dp-pp"}, "cp=2, but the order 'tp-dp-pp' does not name cp"),
        ("tp=2", {"order": "tp-tp"}, "order 'tp-tp': tp is there more than once"),
        ("tp=2", {"order": "tp,dp"}, "order 'tp,dp': expected names joined by '-'"),
        ("tp=2", {"order": ""}, "order '': expected names"),
        ("tp=2", {"order": "etp-dp"}, "etp goes where tp is; leave it out"),
        ("tp=2", {"families": "tp,tp"}, "family 'tp' is there more than once"),
        ("tp=2", {"families": []}, "families: expected at least one"),
        ("tp=2", {"families": "tp-xy"}, "'tp-xy': no dimension 'xy' in this layout: it has"),
        ("tp=2", {"families": ""}, "family '': expected a name"),
        ("tp=2,ep=2", {"families": "cp-ep"}, "the experts' part of a layout has no cp"),
        ("tp=2", {"families": "dp_shard"}, "no dimension 'dp_shard'"),
        ("dp_replicate=2,dp_shard=2,dp=8", {}, "dp=8, but dp_shard*dp_replicate = 2*2 = 4"),
        ("dp_replicate=3,dp=4,tp=2", {}, "dp=4 is not divisible by dp_replicate = 3"),
        ("tp=16", {}, "a world of 8 is not divisible by tp = 16"),
        ("tp=4,dp=4", {"allow_partial": True}, "tp*dp = 4*4 = 16, but the world size is 8"),
        ("dp=8,etp=3", {}, "etp*ep = 3*1 = 3 does not divide the 8 ranks of a pipeline stage"),
        (
            "tp=2,pp=2,etp=1,ep=2",
            {"order": "tp-pp-ep-dp"},
            "the experts' pp groups would have other ranks than those of the rest; put pp last",
        ),
        ("tp=1,dp_replicate=4,dp_shard=2,ep=4", {}, "dp_replicate=4 does not divide edp = 2"),
    ],
)
def test_a_wrong_layout_is_one_line_that_says_what(text, options, message):
    with pytest.raises(LayoutError) as caught:
        parse(text, 8, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("world", [0, -1, True, 2.0, "8", None, 1 << 40, np.float64(8)])
def test_a_wrong_world_size_is_refused(world):
    for make in (
        lambda: parse("tp=1", world),
        lambda: from_mesh((1,), None, world),
        lambda: from_lists({"a": [[0]]}, world),
    ):
        with pytest.raises(LayoutError, match="world size"):
            make()


# --- from_mesh() ---------------------------------------------------------------------------------


def test_a_mesh_is_row_major_and_its_first_dimension_comes_first():
    made = from_mesh((2, 3, 2), ("pp", "dp", "tp"), 12)
    assert [*made.families] == ["pp", "dp", "tp"]
    array = np.arange(12).reshape(2, 3, 2)
    for axis, name in enumerate(("pp", "dp", "tp")):
        rows = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
        assert sorted(made[name]) == sorted(map(tuple, rows.tolist()))
    assert (made.mesh_shape, made.mesh_names) == ((2, 3, 2), ("pp", "dp", "tp"))


def test_a_mesh_without_names_has_numbers_and_one_of_any_names_those():
    assert [*from_mesh((2, 2), None, 4).families] == ["dim_0", "dim_1"]
    made = from_mesh((2, 2), ("Höhe-1", "ep"), 4, families=["Höhe-1", "ep"])
    assert made["Höhe-1"].of(0) == ((0, 2),)
    assert made["ep"].of(0) == ((0, 1),)  # no expert grid: the names are the caller's


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((), None, "the shape of a mesh is empty"),
        ((2, 0), None, "mesh dimension 1=0: expected an integer of at least 1"),
        ((2, -1), None, "mesh dimension 1=-1: expected an integer of at least 1"),
        ((2, 2), ("a",), "expected as many names, not 1"),
        ((2, 2), ("a", "a"), "'a' is there more than once"),
        ((2, 2), ("a", ""), "expected a name that is not empty"),
        ((2, 2), "ab", "mesh names 'ab': expected names"),
        (4, None, r"mesh shape 4: expected sizes"),
        ((2, True), None, "mesh dimension 1=True"),
        ((2, 4), ("a", "b"), r"2 \* 4 = 8, but the world size is 4"),
    ],
)
def test_a_wrong_mesh_is_refused(shape, names, message):
    with pytest.raises(LayoutError, match=message):
        from_mesh(shape, names, 4)


# --- from_lists() --------------------------------------------------------------------------------


def test_lists_keep_the_callers_order_of_families_groups_and_ranks():
    made = from_lists({"z": [[3, 1], [0, 2]], "a": [[2, 0, 1]]}, 4)
    assert [*made.families] == ["z", "a"]
    assert list(made["z"]) == [(3, 1), (0, 2)]
    assert made["a"].of(1) == ((2, 0, 1),)
    assert made["a"].of(3) == ()


@pytest.mark.parametrize(
    ("families", "error", "message"),
    [
        ({"a": []}, LayoutError, "family 'a' has no groups"),
        ({"a": "0,1"}, LayoutError, "'0,1' is no list of groups"),
        ({"a": [0, 1]}, LayoutTypeError, r"group 0: 0 \(int\) is no list of ranks"),
        ({"a": ["01"]}, LayoutTypeError, r"group 0: '01' \(str\) is no list of ranks"),
        ({"a": [b"01"]}, LayoutTypeError, "bytes"),
        ({"a": [{0: 1}]}, LayoutTypeError, "dict"),
        ({"a": [[0.0, 1.0]]}, LayoutTypeError, r"group 0: 0.0 \(float\) is no rank"),
        ({"a": [[True, False]]}, LayoutTypeError, r"True \(bool\) is no rank"),
        ({"a": [np.array([True])]}, LayoutTypeError, "bool"),
        ({"a": [[np.True_]]}, LayoutTypeError, "bool"),
        ({"a": [np.array([[0, 1]])]}, LayoutTypeError, r"\[0, 1\] \(list\) is no rank"),
        ({"a": [np.array(3)]}, LayoutTypeError, r"3 \(int\) is no list of ranks"),
        ({"a": [[None]]}, LayoutTypeError, "NoneType"),
        ({"": [[0]]}, LayoutError, "family '': expected a name"),
        ({3: [[0]]}, LayoutError, "family 3: expected a name"),
        ({"a": [[0, 1], [1, 2]]}, LayoutError, r"rank 1 is in \[0-1\] and in \[1-2\]"),
        ({"a": [range(9)]}, LayoutError, "rank 8 is outside a world of 4"),
        ({"a": [range(0)]}, LayoutError, "no rank in it"),
        ({"a": [range(10**15)]}, LayoutError, f"rank {10**15 - 1} is outside a world of 4"),
        ([[0, 1]], LayoutError, r"families \[\[0, 1\]\]: expected {name"),
        ({"a": [[10**30]]}, LayoutError, "is outside a world of 4"),
    ],
)
def test_wrong_lists_are_refused_with_family_group_and_value(families, error, message):
    with pytest.raises(error, match=message):
        from_lists(families, 4)


def test_overlap_of_a_family_that_is_not_there_is_refused():
    with pytest.raises(LayoutError, match="overlap names 'b', which is no family: there are 'a'"):
        from_lists({"a": [[0]]}, 4, overlap=["b"])
    assert from_lists({"ab": [[0], [0]]}, 4, overlap="ab")["ab"].waves == 2


def test_layouts_go_to_other_processes_and_integers_of_numpy_stay_outside():
    for made in (parse("tp=2,ep=2", np.int64(8), families="megatron"), from_lists({"a": [[1]]}, 8)):
        again = pickle.loads(pickle.dumps(made))
        assert again.digest() == made.digest()
        for family in again.families.values():
            assert all(type(rank) is int for group in family.of(np.int32(1)) for rank in group)


@pytest.mark.parametrize("overlap", [True, 3])
def test_overlap_is_names(overlap):
    with pytest.raises(LayoutError, match=f"overlap {overlap}: expected names of families"):
        from_lists({"a": [[0]]}, 4, overlap=overlap)


def test_a_chain_of_overlapping_groups_takes_two_waves():
    made = from_lists({"ring": [[i, (i + 1) % 64] for i in range(64)]}, 64, overlap="ring")
    assert made["ring"].waves == 2


# --- Texts and digests ---------------------------------------------------------------------------


def test_a_grid_and_the_same_lists_have_one_description():
    made = parse("tp=2,cp=3,ep=2,dp=4,pp=2", 48, families="megatron")
    lists = from_lists({name: list(family) for name, family in made.families.items()}, 48)
    for name in made.families:
        assert lists[name].describe() == made[name].describe(), name
    assert lists.describe() == made.describe()
    assert lists.digest() == made.digest()


def test_descriptions_are_short_and_can_be_read():
    made = parse("tp=2,dp=2,pp=4", 16, families="tp,dp,pp,embd,pos_embd,tp-pp")
    assert made.describe() == (
        "16 ranks; 'tp': 2x1 from 8x2; 'dp': 2x2 from 2x1,4x4; 'pp': 4x4 from 4x1; "
        "'embd': 2x12 from 4x1; 'pos_embd': 1 from 4x1; 'tp-pp': 2x1,4x4 from 2x2"
    )
    odd = from_lists({"a": [[0, 1, 2], [3]], "b": [[5, 4], [1, 0]]}, 8)
    assert odd.describe() == "8 ranks; 'a': 0-2;3; 'b': 2x-1 from 5+2x-4"


def test_a_summary_is_bounded_and_still_tells_layouts_apart():
    def listed(last):
        groups = [[rank, 4095 - rank, rank + 4096][: 2 + rank % 2] for rank in range(2048)]
        return from_lists({"odd": [*groups, [last]], "even": [[0, 1]]}, 8192)

    one, other = listed(8000), listed(8001)
    assert len(one.describe()) > 10_000
    assert len(one.summary()) < 2_200
    assert one.summary() != other.summary()
    assert one.summary().endswith("; 'even': 2x1 from 1")
    short = parse("tp=2,cp=2,ep=2,pp=2", 64, families="megatron")
    assert short.summary() == short.describe()


def test_digests_tell_every_difference():
    layouts = [
        parse("tp=2", 8),
        parse("tp=4", 8),
        parse("tp=2", 8, families="dp,tp"),
        parse("tp=2", 8, families="tp"),
        parse("tp=2", 8, order="dp-tp"),
        parse("tp=2,dp=4", 16, allow_partial=True),
        from_lists({"tp": [[0, 1]]}, 8),
        from_lists({"tp": [[1, 0]]}, 8),
        from_lists({"tp": [[0], [1]]}, 8),
        from_lists({"tp": [[1], [0]]}, 8),
        from_lists({"tq": [[0, 1]]}, 8),
        from_lists({"tp": [[0, 1, 2, 3, 5]]}, 8),
        from_lists({"tp": [[0, 1, 2, 3], [5]]}, 8),
        from_lists({"tp": [[1, 2], [0]]}, 8),
        from_lists({"tp': 1 from 1; 'x": [[0]]}, 8),
        from_lists({"tp": [[0]], "x": [[0]]}, 8),
    ]
    assert len({made.digest() for made in layouts}) == len(layouts)
    assert len({made.describe() for made in layouts}) == len(layouts)


def test_a_rank_outside_the_world_is_refused_by_every_kind_of_family():
    for made in (parse("tp=2", 8), from_lists({"tp": [[0]]}, 8)):
        for rank in (-1, 8):
            with pytest.raises(UsageError, match=f"rank {rank} is outside a world of 8"):
                made["tp"].of(rank)


def test_every_word_of_megatrons_settings_is_known():
    made = parse("tp=2,dp_replicate=2,dp_shard=2", 8, families=[*grids.ALIASES])
    assert len(made.families) == len(grids.ALIASES)
    assert math.prod(made.mesh_shape) == 8
