"""Links that are slow, lose packets, carry one direction, or lead to a host that stands still."""

from __future__ import annotations

import os
import signal
import time

import pytest
from wire import Wire

pytestmark = pytest.mark.fabric


@pytest.fixture
def wired(fabric):
    """wired(count, *wires): hosts gpu-1, ..., the last of them with the wires described."""
    open_wires = []

    def make(count, *wires):
        hosts = fabric.hosts(count - len(wires))
        for how in wires:
            host = fabric.host(f"gpu-{len(hosts) + 1}")
            wire = Wire(host, f"10.77.0.{len(hosts) + 1}/24", **how)
            open_wires.append(wire.__enter__())
            hosts.append(host)
        return hosts, open_wires

    yield make
    # Agents take their leave; on a bad link their last words need several attempts.
    deadline = time.monotonic() + 10
    while fabric.pids() and time.monotonic() < deadline:
        time.sleep(0.05)
    for wire in open_wires:
        wire.__exit__()


# --- Slow is not broken ----------------------------------------------------------------------


def test_hosts_behind_bad_links_join_all_the_same(ranks, wired):
    """A round trip of 300 ms, one packet in ten lost, some of both, 128 kbit/s."""
    links = [{"delay": 0.15}, {"loss": 0.1}, {"delay": 0.05, "loss": 0.05}, {"rate": 128_000}]
    gpu, wires = wired(5, *links)
    job = ranks(dict.fromkeys(gpu, 2), master="10.77.0.1", seconds=30)
    assert {value["hosts"] for value in job.start(body="once").values()} == {5}
    assert all(wire.carried > 20 for wire in wires)
    assert [wire.lost > 0 for wire in wires] == ["loss" in how for how in links]


def test_a_root_behind_a_link_of_64_kbit_s_takes_its_hosts_in(fabric, ranks):
    """By the kernel's own token bucket, on everything that the root sends."""
    gpu = fabric.hosts(4)
    gpu[0].tc("qdisc add dev eth0 root tbf rate 64kbit burst 2kb latency 2s")
    job = ranks(dict.fromkeys(gpu, 1), master="10.77.0.1", seconds=30)
    assert {value["hosts"] for value in job.start(body="once").values()} == {4}


# --- One direction ---------------------------------------------------------------------------


def test_hosts_whose_link_carries_one_direction_are_named_at_the_deadline(ranks, wired):
    gpu, wires = wired(4, {}, {})
    wires[0].deaf = wires[1].dumb = True
    job = ranks(dict.fromkeys(gpu, 1), master="10.77.0.1", seconds=3).start()
    outcomes = job.outcomes()
    assert [outcome.error for outcome in outcomes] == ["JoinTimeout"] * 4
    for outcome in outcomes[:2]:
        assert "missing: ranks 2-3" in outcome.text
    for outcome in outcomes[2:]:
        assert "the root at 10.77.0.1:29500 has not answered" in outcome.text
    assert all(wire.lost > 0 for wire in wires)


@pytest.mark.parametrize("silent", ["deaf", "dumb"])
def test_a_link_that_loses_one_direction_in_a_join_is_named_after_the_heartbeat(
    ranks, wired, silent
):
    gpu, (wire,) = wired(3, {})
    job = ranks(dict.fromkeys(gpu, 2), master="10.77.0.1", seconds=20, COMMKIT_HEARTBEAT="1")
    job.start(gpu[0]).start(gpu[1], ranks=[2]).start(gpu[2])
    job.wait_for_log("gpu-2 has 1 of its 2); joined: 0-1 on gpu-1, ")
    setattr(wire, silent, True)
    outcomes = job.outcomes()
    assert {outcome.error for outcome in outcomes} == {"JoinError"}
    for outcome in outcomes[:3]:
        assert "host gpu-3 with ranks 4-5 is lost: said nothing for 1 s" in outcome.text
    for outcome in outcomes[3:]:
        assert "host gpu-3 lost the rest of the world" in outcome.text
        assert "gpu-1 is gone (said nothing for 1 s)" in outcome.text


def test_a_link_that_is_cut_and_mended_while_a_join_goes_on_is_forgiven(ranks, wired):
    gpu, (wire,) = wired(3, {})
    job = ranks(dict.fromkeys(gpu, 1), master="10.77.0.1", seconds=30)
    wire.deaf = wire.dumb = True
    job.start(body="once")
    job.wait_for_log("agent 1, parent 0 on host gpu-1")
    time.sleep(1.0)
    wire.deaf = wire.dumb = False
    assert {value["hosts"] for value in job.values()} == {3}


# --- Hosts that stand still ------------------------------------------------------------------


def stop(fabric, host, name="commkit-agent"):
    (agent,) = fabric.pids(host, name)
    os.kill(agent, signal.SIGSTOP)
    return agent


def test_a_root_that_stands_still_is_named_at_the_deadline_by_those_who_dial_it(fabric, ranks):
    gpu = fabric.hosts(3)
    job = ranks(dict.fromkeys(gpu, 1), master="10.77.0.1", seconds=4)
    job.start(gpu[0])
    job.wait_for_log("listening on port 29500")
    agent = stop(fabric, gpu[0])
    outcomes = job.start(*gpu[1:]).outcomes()
    os.kill(agent, signal.SIGCONT)
    assert {outcome.error for outcome in outcomes[1:]} == {"JoinTimeout"}
    for outcome in outcomes[1:]:
        assert "the root at 10.77.0.1:29500 has not answered" in outcome.text
    # Its own rank waits a little longer for the agent, and says that it is silent.
    assert outcomes[0].error == "JoinTimeout" and "agent did not say" in outcomes[0].text


def test_an_agent_that_stands_still_in_a_join_is_named_after_the_heartbeat(fabric, ranks):
    gpu = fabric.hosts(3)
    job = ranks(dict.fromkeys(gpu, 1), master="10.77.0.1", seconds=15, COMMKIT_HEARTBEAT="1")
    job.start(gpu[0], gpu[1])
    job.wait_for_log("agent 1, parent 0 on host gpu-1")
    agent = stop(fabric, gpu[1])
    job.wait_for_log("is lost: said nothing for 1 s")
    os.kill(agent, signal.SIGCONT)
    outcomes = job.outcomes()
    assert {outcome.error for outcome in outcomes} == {"JoinError"}
    assert "host gpu-2 with rank 1 is lost: said nothing for 1 s" in outcomes[0].text


def test_a_rank_that_stands_still_before_it_has_joined_is_missing_at_the_deadline(fabric, ranks):
    gpu = fabric.hosts(2)
    job = ranks({gpu[0]: 2, gpu[1]: 1}, master="10.77.0.1", seconds=4)
    job.start(gpu[0], ranks=[1])
    (process,) = job.processes.values()
    os.kill(process.pid, signal.SIGSTOP)
    job.start(gpu[0], gpu[1], ranks=[0, 2])
    first, third = (job.outcome(rank) for rank in (0, 2))
    os.kill(process.pid, signal.SIGCONT)
    job.outcome(1)
    for outcome in (first, third):
        assert outcome.error == "JoinTimeout" and "missing: rank 1" in outcome.text
        assert "gpu-1 has 1 of its 2" in outcome.text


def test_a_host_gone_without_a_fin_in_a_join_is_named_after_the_heartbeat(fabric, ranks):
    """A power failure: its processes and its cable are gone, and its connections half open."""
    gpu = fabric.hosts(3)
    job = ranks({gpu[0]: 1, gpu[1]: 1, gpu[2]: 2}, master="10.77.0.1", COMMKIT_HEARTBEAT="1")
    job.start(gpu[0], gpu[1])
    job.wait_for_log("agent 1, parent 0 on host gpu-1")
    gpu[1].cut()
    for pid in fabric.pids(gpu[1]):
        os.kill(pid, signal.SIGKILL)
    job.start(ranks=[2])
    for rank in (0, 2):
        outcome = job.outcome(rank)
        assert outcome.error == "JoinError"
        assert "host gpu-2 with rank 1 is lost: said nothing for 1 s" in outcome.text
