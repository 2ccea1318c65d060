"""No agent outlives its job by more than 10 s, whatever died."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
from learning import learns
from overlay_jobs import until

from commkit import _C

SECONDS = 10.0
DEEP = {"COMMKIT_TREE_DEGREE": "1"}


def gone(job, but=()):
    """All agents have left, but those that cannot: they are stopped."""
    until(
        lambda: not set(job.agents()) - set(but),
        SECONDS,
        f"agents {job.agents()} outlive their job\n{job._logs()}",
    )


def kill_ranks(job):
    for rank in job.ranks.values():
        os.kill(rank.pid, signal.SIGKILL)


@pytest.mark.parametrize("degree", ["1", "8"])
def test_every_rank_killed_at_once_leaves_no_agent(jobs, degree):
    with jobs([4] * 4, env={"COMMKIT_TREE_DEGREE": degree}) as job:
        job.start_all(learns)
        job.expect(*range(16))
        kill_ranks(job)
        gone(job)


@pytest.mark.parametrize("absent", [0, 15], ids=["no root", "a rank is missing"])
def test_every_rank_killed_in_the_join_leaves_no_agent(jobs, absent):
    with jobs([4] * 3 + [1] * 4, env=DEEP) as job:
        here = range(4, 16) if absent == 0 else range(15)
        for rank in here:
            job.start(rank, learns)
        until(lambda: len(job.agents()) >= 6)
        time.sleep(0.2)
        kill_ranks(job)
        gone(job)


@pytest.mark.parametrize("host", [0, 1, 3])
def test_every_rank_and_an_agent_killed_at_once_leaves_no_agent(jobs, host):
    with jobs([2] * 4, env=DEEP) as job:
        job.start_all(learns)
        job.expect(*range(8))
        victim = job.agent_of(host)
        os.kill(victim, signal.SIGKILL)
        kill_ranks(job)
        gone(job)


@pytest.mark.parametrize("formed", [True, False], ids=["formed", "joining"])
def test_agents_under_a_parent_that_stands_still_leave(jobs, formed):
    with jobs([1, 1, 1, 1], env=DEEP) as job:
        for rank in range(4 if formed else 3):
            job.start(rank, learns)
            until(lambda: job.log_text().count(", parent ") >= min(rank, 2))  # noqa: B023
        if formed:
            job.expect(*range(4))
        still = job.agent_of(1)
        os.kill(still, signal.SIGSTOP)
        try:
            # Its parent waits for it until the heartbeat is missed; its children do not.
            kill_ranks(job)
            root = job.agent_of(0)
            gone(job, but=(still, root))
        finally:
            os.kill(still, signal.SIGCONT)
        gone(job)


def test_a_root_whose_child_stands_still_leaves_after_the_heartbeat(jobs):
    with jobs([1, 1], env={"COMMKIT_HEARTBEAT": "2"}) as job:
        job.start_all(learns)
        job.expect(0, 1)
        still = job.agent_of(1)
        os.kill(still, signal.SIGSTOP)
        try:
            kill_ranks(job)
            gone(job, but=(still,))
        finally:
            os.kill(still, signal.SIGCONT)
        gone(job)


def holds_a_connection(me, name):
    """A process of this user that connects to the agent and says nothing."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(f"\0{name}")
        me.meet()


def test_a_silent_local_connection_does_not_keep_an_agent(jobs):
    with jobs([1, 1]) as job:
        job.start(0, learns)
        [name] = until(
            lambda: [a["name"] for a in _C.agents() if str(job.directory) in a.get("log", "")]
        )
        job.start(1, holds_a_connection, name, host=0, label="silent")
        job.expect("silent")
        job.kill(0)
        gone(job)
        job.tell("silent")
        job.values("silent")
