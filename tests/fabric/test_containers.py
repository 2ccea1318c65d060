"""Ranks in containers: PID namespaces of their own, one for all ranks of a host or one for each."""

from __future__ import annotations

import os
import signal

import pytest

pytestmark = pytest.mark.fabric

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc")


def inits(fabric, host):
    """The processes that are number 1 of a PID namespace on this host."""
    found = []
    for pid in fabric.pids(host):
        with open(f"/proc/{pid}/status") as status:
            [line] = [line for line in status if line.startswith("NSpid:")]
        if line.split()[2:] == ["1"]:
            found.append(pid)
    return found


def test_ranks_of_one_host_in_a_container_each_form_a_world(fabric, ranks):
    gpu = fabric.hosts(2)
    job = ranks(dict.fromkeys(gpu, 2), master="10.77.0.1", under=CONTAINER)
    assert {value["hosts"] for value in job.start(body="once").values()} == {2}


def test_a_death_in_another_container_of_the_host_is_told_everywhere(fabric, ranks):
    """The agent cannot see that process; the end of its connection shows that it is gone."""
    gpu = fabric.hosts(2)
    job = ranks(dict.fromkeys(gpu, 2), master="10.77.0.1", under=CONTAINER)
    job.start(gpu[0], ranks=[0], body="watch")
    job.wait_for_log("of host gpu-1,")  # in the first container
    first = inits(fabric, gpu[0])
    job.start(gpu[0], ranks=[1], body="watch").start(gpu[1], body="watch").formed()
    [second] = set(inits(fabric, gpu[0])) - set(first)
    os.kill(second, signal.SIGKILL)
    for rank in (0, 2, 3):
        outcome = job.outcome(rank)
        assert outcome.value and "rank 1 " in outcome.value["failures"][0], outcome
        assert "gpu-1" in outcome.value["failures"][0]
    job.processes[1].wait(10)


def test_a_container_that_is_killed_with_all_its_ranks_leaves_nothing(fabric, ranks):
    gpu = fabric.hosts(2)
    job = ranks({gpu[0]: 1, gpu[1]: 1}, master="10.77.0.1")
    job.start(gpu[0], body="watch").start(gpu[1], body="watch", under=CONTAINER).formed()
    assert len(fabric.pids(gpu[1], "commkit-agent")) == 1
    [init] = inits(fabric, gpu[1])
    os.kill(init, signal.SIGKILL)
    outcome = job.outcome(0)
    assert outcome.value and "gpu-2" in outcome.value["failures"][0], outcome
    job.processes[1].wait(10)
    assert fabric.pids(gpu[1]) == []
