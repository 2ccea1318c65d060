"""Flows get uplinks as evenly as can be, ports that lead there, and honest advice."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commkit.errors import UsageError
from commkit.topology.ecmp import TCP, Chip, FiveTuple, Linux, Probed
from commkit.topology.paths import (
    advice,
    assign,
    choose_ports,
    fullest,
    least_fullest,
    reassign,
)

CASES = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).resolve().parent.parent / "cases" / "placement.json").read_text()
    )
}


def random_flows(draw, leaves, count):
    return [tuple(draw.sample(range(leaves), 2)) for _ in range(count)]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 30), uplinks=st.integers(1, 40), leaves=st.integers(2, 12))
def test_no_link_has_more_than_the_bound(seed, uplinks, leaves):
    draw = random.Random(seed)
    flows = random_flows(draw, leaves, draw.randint(0, 150))
    paths = assign(flows, uplinks)
    assert all(0 <= path < uplinks for path in paths)
    assert fullest(flows, paths) == least_fullest(flows, uplinks)


def test_a_thousand_instances_meet_the_bound():
    draw = random.Random(11)
    for _ in range(1000):
        flows = random_flows(draw, draw.randint(2, 8), draw.randint(1, 60))
        uplinks = draw.choice((1, 2, 3, 4, 5, 7, 8, 12, 16))
        assert fullest(flows, assign(flows, uplinks)) == least_fullest(flows, uplinks)


def test_each_leaf_by_itself_is_even():
    """Not only the busiest: a quiet leaf has ceil(its flows / uplinks) at most, too."""
    draw = random.Random(4)
    flows = random_flows(draw, 6, 50) + [(0, 1)] * 200
    paths = assign(flows, 8)
    for leaf in range(6):
        mine = [path for (a, _), path in zip(flows, paths, strict=True) if a == leaf]
        assert max(map(mine.count, set(mine)), default=0) <= -(-len(mine) // 8)


def test_a_flow_within_a_leaf_is_refused():
    with pytest.raises(UsageError, match="flow 1 stays under leaf 3"):
        assign([(0, 1), (3, 3)], 4)
    with pytest.raises(UsageError, match="0 uplinks"):
        assign([(0, 1)], 0)


def test_links_that_are_down_are_avoided_at_both_ends():
    draw = random.Random(8)
    flows = random_flows(draw, 4, 64)
    down = {(0, 1), (2, 3)}
    paths = reassign(flows, 4, down)
    for (a, b), path in zip(flows, paths, strict=True):
        assert not down & {(a, path), (b, path)}
    # Leaves 0 and 2 have three uplinks left, one of which the other's loss takes away as well.
    assert fullest(flows, paths) <= -(-least_fullest(flows, 3) * 3 // 2)
    assert fullest(flows, reassign(flows, 4)) == least_fullest(flows, 4)


def test_leaves_without_a_common_uplink_are_named():
    with pytest.raises(UsageError, match="no uplink joins leaves 0 and 1"):
        reassign([(0, 1)], 2, {(0, 0), (1, 1)})


@pytest.mark.parametrize("six", [False, True])
def test_chosen_ports_lead_to_the_assigned_uplinks(six):
    leaves, spines = 4, 4
    models = [Linux(100 + leaf, (1,) * spines) for leaf in range(leaves)]
    pairs = [(leaf, (leaf + 1) % leaves) for leaf in range(leaves) for _ in range(4)]
    wanted = assign(pairs, spines)

    def name(leaf, host):
        return f"fd00:{leaf}::{host}" if six else f"10.{leaf}.0.{host}"

    flows = [FiveTuple(name(a, 2), name(b, 3), TCP, 0, 7000) for a, b in pairs]
    ports = choose_ports(flows, wanted, [models[a] for a, _ in pairs])
    taken = [
        models[a].path(f.with_source_port(port))
        for f, port, (a, _) in zip(flows, ports, pairs, strict=True)
    ]
    assert taken == wanted and fullest(pairs, taken) == 1
    keys = [(f.source, f.destination, port) for f, port in zip(flows, ports, strict=True)]
    assert len(set(keys)) == len(keys)


def test_a_port_that_cannot_be_found_names_the_flow():
    flow = FiveTuple("10.0.0.1", "10.0.0.2", TCP, 0, 80)
    with pytest.raises(UsageError, match=r"flow 0, 10.0.0.1 to 10.0.0.2: no source port of 5 to 5"):
        choose_ports([flow], [1], [Probed({})], range(5, 6))
    with pytest.raises(UsageError, match="no source port"):
        choose_ports([flow] * 3, [0] * 3, [Chip("crc", 1)] * 3, range(5, 7))


def test_place_04_advice_depends_on_tiers_and_fabric():
    kinds = {"RoCE": "roce", "InfiniBand adaptive routing": "infiniband-adaptive"}
    rows = CASES["PLACE-04"]["input"]["data"]
    near, far, adaptive = (
        advice(fabric=kinds[row["fabric"]], tiers=row["tiers_crossed"], flows=16, uplinks=32)
        for row in rows
    )
    (one,) = near
    assert (one.kind, one.settings) == ("keep", (("NCCL_IB_QPS_PER_CONNECTION", "1"),))
    assert "one path" in one.reason
    assert {a.kind for a in far} == {"measure"}
    assert len(dict.fromkeys(far[0].settings)) > 1 and "measure" in far[0].reason
    (one,) = adaptive
    assert one.kind == "keep" and "adaptive routing" in one.reason


def test_advice_says_what_it_expects():
    far = advice(fabric="roce", tiers=2, flows=8, uplinks=32)
    split = next(a for a in far if "split into two" in a.reason)
    assert "from 0.61 to 0.05 for 8 flows over 32" in split.reason
    assert "1.66 of 8 flows" in far[0].reason
    assert "not known here" in advice(fabric="tcp", tiers=2)[0].reason
    known = advice(fabric="tcp", tiers=2, hash_known=True, ports_settable=True)
    assert known[0].kind == "keep" and "choose ports" in known[0].reason


def test_advice_about_nothing_known_is_refused():
    with pytest.raises(UsageError, match="'token ring'"):
        advice(fabric="token ring", tiers=2)
    with pytest.raises(UsageError, match="0 tiers"):
        advice(fabric="roce", tiers=0)
