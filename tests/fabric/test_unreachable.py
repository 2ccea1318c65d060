"""Hosts that fall silent: while they join, after the world has formed, and for one peer only."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.fabric


def test_a_host_that_never_reaches_the_root_is_missing_by_its_ranks(fabric, ranks):
    gpu = fabric.hosts(4)
    gpu[2].cut()
    job = ranks(dict.fromkeys(gpu, 2), master="10.77.0.1", seconds=4).start()
    outcomes = job.outcomes()
    assert [outcome.error for outcome in outcomes] == ["JoinTimeout"] * 8
    for outcome in outcomes[:4] + outcomes[6:]:
        assert "6 of 8 ranks joined; missing: ranks 4-5" in outcome.text
    for outcome in outcomes[4:6]:
        assert "ranks 4-5 on host gpu-3" in outcome.text
        assert "the root at 10.77.0.1:29500 has not answered" in outcome.text
    # Long before the deadline the ranks who were there could read who was not.
    assert any("missing: ranks 4-5" in notice for notice in outcomes[0].notices)


def test_a_host_that_is_cut_off_while_it_joins_is_named(fabric, ranks):
    gpu = fabric.hosts(3)
    job = ranks(dict.fromkeys(gpu, 2), master="10.77.0.1", seconds=12, COMMKIT_HEARTBEAT="1")
    job.start(gpu[0]).start(gpu[1], ranks=[2])
    # gpu-2 has come, but rank 3 is still missing there.
    job.wait_for_log("agent 1, parent 0 on host gpu-1")
    job.wait_for_notice(0, "gpu-2 has 1 of its 2")
    gpu[1].cut()
    first, second, third = job.outcomes()
    for outcome in (first, second):
        assert outcome.error == "JoinError"
        assert "host gpu-2 with rank 2 is lost" in outcome.text
        assert "while joining" in outcome.text
    assert third.error == "JoinError"
    assert "host gpu-2" in third.text and "gpu-1" in third.text


def test_a_host_cut_off_from_a_formed_world_is_named_everywhere(fabric, ranks):
    gpu = fabric.hosts(4)
    job = ranks(dict.fromkeys(gpu, 2), master="10.77.0.1", COMMKIT_HEARTBEAT="1")
    job.start(body="watch").formed()
    gpu[2].cut()
    values = job.values()
    for value in values[:4] + values[6:]:
        assert "host gpu-3 with ranks 4-5 is lost" in value["failures"][0]
        assert (value["error"], value["text"]) == ("RankDied", value["failures"][0])
    for value in values[4:6]:
        assert "host gpu-3 lost the rest of the world" in value["failures"][0]
        assert value["error"] == "RankDied"


def test_an_interior_host_that_is_cut_off_takes_its_subtree_with_it(fabric, ranks):
    gpu = fabric.hosts(3)
    job = ranks(
        dict.fromkeys(gpu, 2),
        master="10.77.0.1",
        COMMKIT_HEARTBEAT="1",
        COMMKIT_TREE_DEGREE="1",
    )
    job.start(gpu[0], body="watch").start(gpu[1], body="watch")
    job.wait_for_log("agent 1, parent 0 on host gpu-1")
    job.start(gpu[2], body="watch").formed()
    gpu[1].cut()
    values = job.values()
    for value in values[:2]:
        assert "host gpu-2 with ranks 2-5 is lost" in value["failures"][0]
    for value in values[4:]:
        assert "parent agent on host gpu-2 is gone" in value["failures"][0]


@pytest.mark.parametrize("how", ["no route", "silence"])
def test_a_host_that_cannot_reach_its_parent_is_placed_under_the_root(fabric, ranks, how):
    gpu = fabric.hosts(4)
    if how == "silence":
        gpu[2].ignore("10.77.0.2")
    else:
        gpu[2].ip("route add blackhole 10.77.0.2/32")
    job = ranks(dict.fromkeys(gpu, 2), master="10.77.0.1", COMMKIT_TREE_DEGREE="1")
    job.start(gpu[0], gpu[1])
    job.wait_for_log("agent 1, parent 0 on host gpu-1")
    job.start(gpu[2])
    job.wait_for_log("cannot reach the parent on host gpu-2")
    job.wait_for_log("agent 2, parent 0 on host gpu-1")
    # The keys of gpu-2 are still for everybody: they take another way.
    values = job.start(gpu[3]).values()
    assert [value["hosts"] for value in values] == [4] * 8
    assert values[0]["agent"]["children"] == "2"
