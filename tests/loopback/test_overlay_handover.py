"""Hosts whose ranks leave before those below them in the tree, and whose agents are then killed.

So does what ends a host's processes with its last rank: a cgroup's end, a pod's, Slurm's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
from overlay_jobs import until

pytestmark = pytest.mark.timeout(300)  # the first test may have to build the sanitized agent
CHAIN = {"COMMKIT_TREE_DEGREE": "1", "COMMKIT_HEARTBEAT": "60"}


def start_in_order(job, body, *arguments):
    """Host n is agent n: with degree 1 a chain, host n below host n - 1."""
    rank = 0
    for host, ranks in enumerate(job.hosts):
        for _ in range(ranks):
            job.start(rank, body, *arguments)
            rank += 1
        until(lambda host=host: job.log_text().count(", parent ") == host)


def kill_agent(job, host):
    """SIGKILL, unless it has left by itself."""
    for pid, name in job.agents().items():
        if name == f"host-{host}":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def end_of_host(job, host, *ranks):
    """Its ranks leave and end, and then whatever else there is of it."""
    job.tell(*ranks, value="leave")
    assert job.values(*ranks) == [[]] * len(ranks)
    kill_agent(job, host)


def names_of(rank):
    # One belongs to its rank's host, the others to some interior agent by their hash.
    return [f"commkit:{rank}/k", *(f"of {rank}, {n}" for n in range(8))]


def lives(me):
    """Does what it is told until it is to leave; what it has heard of failures."""
    world = me.join()
    for name in names_of(me.rank):
        world.keys.set(name, b"%d" % me.rank, 10)
    world.connected("all", range(me.world_size))
    world.barrier(timeout=20)
    me.say("in")
    while (order := me.hear()) != "leave":
        kind, *rest = order
        if kind == "read":
            for rank in range(me.world_size):
                got = world.keys.get(names_of(rank), 10)
                assert got == [b"%d" % rank] * len(got), (rank, got)
        elif kind == "set":
            world.keys.set(rest[0], rest[1], 10)
        elif kind == "wait":
            world.keys.wait([rest[0]], 20)
        elif kind == "gather":
            got = world.gather(b"%d" % me.rank, 0, timeout=20)
            assert me.rank != 0 or got == [b"%d" % rank for rank in range(me.world_size)]
        elif kind == "group":
            world.connected("some", rest[0])
        elif kind == "loss":
            until(world.failures, 20)
        me.say(kind)
    failures = list(world.failures())
    assert world.leave(20) is True
    return failures + [text for text in world.failures() if text not in failures]


def order(job, ranks, *what):
    job.tell(*ranks, value=what)
    assert job.expect(*ranks) == [what[0]] * len(ranks)


def go_on(job, ranks):
    """These can still do all that a world is for."""
    order(job, ranks, "read")
    job.tell(*ranks[:-1], value=("wait", "a signal"))
    order(job, ranks[-1:], "set", "a signal", b"")
    assert job.expect(*ranks[:-1]) == ["wait"] * (len(ranks) - 1)
    order(job, ranks, "group", list(ranks))
    for rank in ranks[1:]:  # in this order: each time a host above leaves before those below
        end_of_host(job, job.host_of(rank), rank)
    end_of_host(job, 0, 0)


def test_an_interior_host_ends_and_the_hosts_below_it_go_on(checked_jobs):
    with checked_jobs([1, 2, 1, 1], env=CHAIN) as job:
        start_in_order(job, lives)
        job.expect(*range(5))
        end_of_host(job, 1, 1, 2)
        assert "handing children and keys over to host host-0" in job.log_text(1)
        go_on(job, [0, 3, 4])


def test_neighbours_in_the_tree_end_at_the_same_time(checked_jobs):
    with checked_jobs([1] * 6, env=CHAIN) as job:
        start_in_order(job, lives)
        job.expect(*range(6))
        job.tell(1, 2, 3, value="leave")
        assert job.values(1, 2, 3) == [[]] * 3
        for host in (1, 2, 3):
            kill_agent(job, host)
        go_on(job, [0, 4, 5])


def test_an_agent_with_several_children_hands_all_of_them_over(checked_jobs):
    with checked_jobs([1] * 8, env={**CHAIN, "COMMKIT_TREE_DEGREE": "3"}) as job:
        start_in_order(job, lives)
        job.expect(*range(8))
        end_of_host(job, 1, 1)  # its children are hosts 4, 5 and 6
        go_on(job, [0, 2, 3, 4, 5, 6, 7])


def test_what_is_under_way_when_a_host_ends_is_not_lost(checked_jobs):
    with checked_jobs([1, 1, 1, 1, 1], env=CHAIN) as job:
        start_in_order(job, lives)
        job.expect(*range(5))
        for rank in (1, 3, 4):
            order(job, [rank], "gather")  # a rank that only gives does not wait
        job.tell(2, value=("wait", "later"))  # merged with another's, at an agent that leaves
        job.tell(0, value=("wait", "later"))
        time.sleep(0.3)
        end_of_host(job, 1, 1)
        order(job, [3], "set", "later", b"")
        assert job.expect(0, 2) == ["wait", "wait"]
        order(job, [2], "gather")
        order(job, [0], "gather")
        go_on(job, [0, 2, 3, 4])


def test_a_rank_dies_after_its_host_was_handed_over(checked_jobs):
    with checked_jobs([1, 1, 1, 1], env=CHAIN) as job:
        start_in_order(job, lives)
        job.expect(*range(4))
        end_of_host(job, 1, 1)
        job.kill(3)
        order(job, [0, 2], "loss")
        job.tell(0, 2, value="leave")
        for failures in job.values(0, 2):
            assert len(failures) == 1 and "rank 3 (pid" in failures[0] and "host-3" in failures[0]


def test_a_child_that_does_not_answer_holds_up_the_last_rank_for_a_short_time_only(jobs):
    with jobs([1, 1, 1, 1], env=CHAIN) as job:
        start_in_order(job, lives)
        job.expect(*range(4))
        stopped = job.agent_of(2)
        os.kill(stopped, signal.SIGSTOP)
        job.tell(1, value="leave")
        assert job.values(1) == [[]]
        agent = job.agent_of(1)
        os.kill(stopped, signal.SIGCONT)
        # It goes on trying.
        until(lambda: agent not in job.agents(), 10, "host-1 hands over when host-2 answers")
        go_on(job, [0, 2, 3])


def test_the_root_host_s_last_rank_waits_a_little_for_the_other_hosts(jobs):
    with jobs([2, 1, 1], env=CHAIN) as job:
        start_in_order(job, lives)
        job.expect(*range(4))
        job.tell(0, value="leave")
        assert job.values(0) == [[]]  # another rank of its host is still there
        job.tell(1, value="leave")
        assert not job.ranks[1].pipe.poll(1.0)
        job.tell(2, 3, value="leave")
        assert job.values(2, 3) == [[], []]
        assert job.values(1) == [[]]
        kill_agent(job, 0)


def test_the_root_host_s_last_rank_does_not_wait_for_the_end_of_the_job(jobs):
    with jobs([1, 1], env=CHAIN) as job:
        start_in_order(job, lives)
        job.expect(0, 1)
        job.tell(0, value="leave")
        assert job.values(0) == [[]]
        order(job, [1], "read")
        job.tell(1, value="leave")
        assert job.values(1) == [[]]
