"""The canonical description of a fabric and the groups that planning derives from it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commkit.errors import TopologyError
from commkit.topology.fabric import Fabric, Host, Link, Nic, Switch, leaf_spine


def test_hosts_of_a_leaf_are_one_group_and_the_spines_join_all():
    fabric = leaf_spine(2, leaves=3, spines=2, uplinks=4, uplink_gbps=400)
    near, far = fabric.levels()
    assert near.group == (0, 0, 1, 1, 2, 2)
    assert near.switches == ((0,), (1,), (2,))
    assert near.uplinks == (8, 8, 8)
    assert near.uplink_gbps == (3200, 3200, 3200)
    assert far.group == (0,) * 6
    assert far.uplinks == (0,)
    assert [fabric.switches[s].name for s in far.switches[0]] == ["spine0", "spine1"]


def test_a_rail_optimised_fabric_has_one_group_of_leaves_and_one_leaf_a_rail():
    fabric = leaf_spine(4, leaves=2, spines=1, rails=8)
    assert fabric.rails == tuple(range(8))
    assert len(fabric.levels()[0].switches[0]) == 8
    for rail in fabric.rails:
        (only,) = fabric.levels(rail)[0].switches[1]
        assert fabric.switches[only].name == f"leaf1-rail{rail}"


def test_rails_of_a_rail_only_fabric_meet_in_hosts_alone():
    fabric = leaf_spine(2, leaves=2, spines=1, rails=2, rail_only=True)
    tops = [fabric.levels(rail)[-1].switches for rail in fabric.rails]
    names = [[fabric.switches[s].name for s in switches[0]] for switches in tops]
    assert names == [["spine0-rail0"], ["spine0-rail1"]]


def test_pods_without_a_core_are_fabrics_of_their_own():
    apart = leaf_spine(1, leaves=4, spines=2, leaves_per_pod=2)
    assert apart.components() == (0, 0, 1, 1)
    assert apart.distance(0, 3) is None
    assert apart.meeting(0, 3) == ()
    joined = leaf_spine(1, leaves=4, spines=2, leaves_per_pod=2, cores=2)
    assert [joined.distance(0, i) for i in range(4)] == [0, 1, 2, 2]
    assert [joined.switches[s].name for s in joined.meeting(0, 3)] == ["core0", "core1"]
    assert [joined.switches[s].name for s in joined.meeting(2, 3)] == ["spine1.0", "spine1.1"]


def test_a_branch_that_ends_early_is_its_own_group_at_every_level():
    fabric = Fabric(
        (Host("a", (Nic(switch=0),)), Host("b", (Nic(switch=1),)), Host("c", (Nic(switch=2),))),
        (Switch("l0"), Switch("l1"), Switch("l2"), Switch("mid", 1), Switch("top", 2)),
        (Link(0, 3), Link(1, 3), Link(3, 4), Link(2, 4)),
    )
    assert [level.group for level in fabric.levels()] == [(0, 1, 2), (0, 0, 1), (0, 0, 0)]
    assert fabric.levels()[1].switches == ((3,), (2,))
    assert fabric.levels()[0].uplinks == (None, None, None)
    assert fabric.roots == (4,)


def test_a_host_without_a_switch_is_nobody_s_neighbour():
    fabric = Fabric((Host("a", (Nic(switch=0),)), Host("b"), Host("c")), (Switch("s"),))
    assert fabric.unplaced == (1, 2)
    assert fabric.components() == (0, -1, -1)
    assert fabric.distance(1, 2) is None
    assert fabric.distance(0, 0) == 0


def test_a_job_keeps_its_order_and_lists_the_hosts_that_have_no_place():
    fabric = leaf_spine(2, leaves=2)
    job = fabric.select(["h00003", "nowhere", "h00000"])
    assert [host.name for host in job.hosts] == ["h00003", "nowhere", "h00000"]
    assert job.unplaced == (1,)
    assert job.notes == ("1 of 3 hosts have no place in the topology: nowhere",)
    assert job.order() == (0, 2, 1)
    with pytest.raises(TopologyError, match="'h00003' is named twice"):
        fabric.select(["h00003", "h00003"])


def test_a_host_is_found_by_its_provider_s_id_too_and_not_twice():
    fabric = Fabric((Host("n1", id="i-1"), Host("n2", id="n1")))
    assert fabric.host_index == {"i-1": 0, "n1": 0, "n2": 1}
    with pytest.raises(TopologyError, match="named twice"):
        fabric.select(["n1", "i-1"])


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"hosts": (Host("a"), Host("a"))}, "host 'a' occurs twice"),
        ({"switches": (Switch("a"), Switch("a"))}, "switch 'a' occurs twice"),
        ({"hosts": (Host(""),)}, "a host without a name"),
        ({"hosts": (Host("a", (Nic(switch=0),)),)}, "host 'a': no switch of index 0"),
        ({"switches": (Switch("a", -1),)}, "layer -1 is below 0"),
        ({"switches": (Switch("a"),), "links": (Link(0, 0),)}, "expected two others"),
        ({"switches": (Switch("a"),), "links": (Link(0, 1),)}, "expected two others"),
        ({"switches": (Switch("a"), Switch("b")), "links": (Link(0, 1, 0),)}, "a - b: count is 0"),
        ({"hosts": (Host("a", (Nic("n", gbps=float("nan")),)),)}, "NIC n: gbps is nan"),
    ],
)
def test_what_cannot_be_a_fabric_is_refused(wrong, expected):
    with pytest.raises(TopologyError, match=expected):
        Fabric(**wrong)


@pytest.mark.parametrize("sizes", [{"leaves": 0}, {"rails": 0, "leaves": 1}, {"uplinks": 0}])
def test_a_shape_of_nothing_is_refused(sizes):
    with pytest.raises(TopologyError, match="expected 1 or more"):
        leaf_spine(4, **sizes)


def test_the_largest_fabric_in_use_is_made_and_grouped():
    fabric = leaf_spine(64, 196, 32, rails=8, leaves_per_pod=28, cores=16)
    assert len(fabric.hosts) == 12544
    assert [level.groups for level in fabric.levels()] == [196, 7, 1]
    assert [level.groups for level in fabric.levels(3)] == [196, 7, 1]


shapes = st.builds(
    leaf_spine,
    st.lists(st.integers(1, 3), min_size=1, max_size=6),
    spines=st.integers(1, 3),
    rails=st.integers(1, 3),
    rail_optimised=st.booleans(),
    rail_only=st.booleans(),
    leaves_per_pod=st.sampled_from([None, 1, 2, 3]),
    cores=st.integers(0, 2),
)


@settings(max_examples=40, deadline=None)
@given(shapes, st.randoms(use_true_random=False))
def test_levels_nest_and_follow_hosts_wherever_they_stand(fabric, random):
    levels = fabric.levels()
    for lower, upper in itertools.pairwise(levels):
        assert len(set(zip(lower.group, upper.group, strict=True))) == len(set(lower.group))
    shuffled = list(range(len(fabric.hosts)))
    random.shuffle(shuffled)
    moved = dataclasses.replace(fabric, hosts=tuple(fabric.hosts[i] for i in shuffled))
    for here, there in itertools.product(range(len(shuffled)), repeat=2):
        assert moved.distance(here, there) == fabric.distance(shuffled[here], shuffled[there])


@settings(max_examples=30, deadline=None)
@given(shapes, st.randoms(use_true_random=False))
def test_the_order_of_a_walk_leaves_no_group_and_returns(fabric, random):
    hosts = list(fabric.hosts)
    random.shuffle(hosts)
    fabric = dataclasses.replace(fabric, hosts=tuple(hosts))
    walk = fabric.order()
    assert sorted(walk) == list(range(len(hosts)))
    for level in fabric.levels():
        runs = [group for group, _ in itertools.groupby(level.group[i] for i in walk)]
        assert len(runs) == len(set(runs))


def test_places_of_a_provider_are_connected_though_no_switch_joins_them():
    apart = leaf_spine(1, leaves=4, spines=2, leaves_per_pod=2)
    joined = dataclasses.replace(apart, joined=True)
    assert joined.components() == (0, 0, 0, 0)
    assert (joined.distance(0, 1), joined.distance(0, 3)) == (1, 2)
    assert joined.meeting(0, 3) == ()
    lost = dataclasses.replace(joined, hosts=(*joined.hosts, Host("x")))
    assert lost.components()[-1] == -1
    assert lost.distance(0, 4) is None


def test_cables_have_one_canonical_order_and_equal_ones_are_one_link():
    fabric = Fabric(
        switches=(Switch("top", 1), Switch("l0"), Switch("l1")),
        links=(Link(0, 2, 1, 400), Link(0, 1, 2, 400), Link(1, 0, 1, 400), Link(1, 0, None, 100)),
    )
    assert fabric.links == (Link(1, 0, None, 100), Link(1, 0, 3, 400), Link(2, 0, 1, 400))
