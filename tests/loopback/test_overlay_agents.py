"""Agents that are killed, stopped, listed or paused; notices, and what an agent keeps open."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from overlay_jobs import until
from test_overlay_life import DEEP, in_world, watches

from commkit import _C, errors, overlay

pytestmark = pytest.mark.timeout(300)  # the first test may have to build the sanitized agent


def loses_agent(me):
    world = me.join()
    me.meet()
    with pytest.raises(errors.CommkitError) as caught:
        world.barrier(timeout=20)
    until(world.failures, 5, "failures() tells of the end of the agent")
    world.leave(1)
    return type(caught.value).__name__, str(caught.value), world.identity.agent_log


@pytest.mark.parametrize(("victim", "degree"), [(0, "8"), (1, "1"), (3, "1")])
def test_a_killed_agent_is_noticed_by_its_ranks_and_by_every_host(checked_jobs, victim, degree):
    with checked_jobs([1, 2, 1, 1], env={"COMMKIT_TREE_DEGREE": degree}) as job:
        job.start_all(loses_agent)
        job.expect(*range(5))
        os.kill(job.agent_of(victim), signal.SIGKILL)
        job.tell(*range(5))
        for rank, (kind, text, log) in enumerate(job.values()):
            if job.host_of(rank) == victim:
                assert kind == "OverlayError" and log in text
                assert Path(log).is_file()
            else:
                assert kind == "RankDied" and "host-" in text


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_agent_is_noticed_after_the_heartbeat(checked_jobs, victim):
    with checked_jobs([1, 1, 1], env={"COMMKIT_HEARTBEAT": "1", **DEEP}) as job:
        job.start_all(watches)
        agents = job.expect(0, 1, 2)
        os.kill(agents[victim], signal.SIGSTOP)
        others = [rank for rank in range(3) if rank != victim]
        job.tell(*others)
        values = job.values(*others)
        os.kill(agents[victim], signal.SIGCONT)
        job.tell(victim)
        job.values(victim)  # its own ranks hear that they were given up
        for failures, _ in values:
            assert f"host-{victim}" in failures[0] and "nothing for 1 s" in failures[0]


def survives(me):
    world = me.join()
    me.meet(world.identity.agent_pid)
    world.barrier(timeout=10)
    failures = world.failures()
    me.meet()
    world.leave(5)
    return failures


def test_a_machine_that_paused_as_a_whole_loses_nobody(checked_jobs):
    with checked_jobs([1, 1, 1], env={"COMMKIT_HEARTBEAT": "0.5", **DEEP}) as job:
        job.start_all(survives)
        agents = job.expect(0, 1, 2)
        for pid in agents:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)  # three heartbeats
        for pid in agents:
            os.kill(pid, signal.SIGCONT)
        job.tell(0, 1, 2)
        job.expect(0, 1, 2)
        job.tell(0, 1, 2)
        assert job.values() == [[], [], []]


def mine(job):
    return {one["log"]: one for one in _C.agents() if one.get("log", "").startswith(job)}


def test_agents_lists_what_runs_and_stop_agent_ends_it(checked_jobs):
    with checked_jobs([2, 1, 1], env=DEEP) as job:
        job.start_all(watches)
        pids = job.expect(*range(4))
        listed = mine(str(job.directory)).values()
        assert {one["pid"] for one in listed} == {str(pid) for pid in pids}
        assert {one["state"] for one in listed} == {"formed"}
        assert {one["world_size"] for one in listed} == {"4"}
        assert sorted(one["ranks"] for one in listed) == ["0-1", "2", "3"]
        assert [one["role"] for one in listed].count("root") == 1
        name = next(one["name"] for one in listed if one["ranks"] == "2")
        _C.stop_agent(name, 5)
        job.tell(*range(4))
        for failures, _ in job.values():
            assert "stopped by hand" in " ".join(failures) or "lost" in " ".join(failures)
        job.wait_for_agents_to_leave()
    with pytest.raises(_C.Failure, match="does not answer"):
        _C.stop_agent(name, 1)


def notice_outlives_world(me):
    entered = threading.Event()

    def slow(kind, text):
        entered.set()
        time.sleep(0.2)

    world = overlay.join(me.spec(), 20, notice=slow)
    me.meet()
    assert entered.wait(20)
    atexit.unregister(world._at_exit)
    del world  # inside the notice of the death: the reader thread holds no lock that this needs
    gc.collect()


def test_a_world_may_be_dropped_while_a_notice_is_being_delivered(checked_jobs):
    with checked_jobs([2], deadline=20.0) as job:
        job.start(0, notice_outlives_world)
        job.start(1, in_world)
        job.expect(0, 1)
        job.kill(1)
        job.tell(0)
        job.values(0)


def leaves_in_notice(me):
    left = threading.Event()

    def notice(kind, text):
        if kind == "died":
            world.leave(1)
            left.set()

    world = overlay.join(me.spec(), 20, notice=notice)
    me.meet()
    assert left.wait(20)


def test_a_notice_may_leave_the_world(checked_jobs):
    with checked_jobs([2], deadline=20.0) as job:
        job.start(0, leaves_in_notice)
        job.start(1, in_world)
        job.expect(0, 1)
        job.kill(1)
        job.tell(0)
        job.values(0)


def starts_a_program(me):
    world = me.join()
    # What a rank starts must not keep the agent's descriptors, nor the agent those of the rank.
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    open_files = {os.readlink(p) for p in Path(f"/proc/{world.identity.agent_pid}/fd").iterdir()}
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(len(os.listdir('/proc/self/fd')))"],
        capture_output=True,
        text=True,
        close_fds=False,
        check=True,
    )
    os.close(writing)
    os.close(reading)
    session = os.getsid(world.identity.agent_pid)
    world.leave(5)
    return sorted(open_files), int(done.stdout), session


def test_agent_and_ranks_share_no_descriptor_and_no_session(checked_jobs):
    with checked_jobs([1, 1]) as job:
        job.start_all(starts_a_program)
        for open_files, count, session in job.values():
            assert not [name for name in open_files if name.startswith("pipe:")]
            assert count <= 8
            assert session not in (os.getsid(0), *(rank.pid for rank in job.ranks.values()))
