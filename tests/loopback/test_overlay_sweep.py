"""Worlds in which some process is killed at some moment of the join: nobody hangs, all know.

`pytest --sweep-worlds 500 tests/loopback/test_overlay_sweep.py` looks for longer, `--sweep-seed`
repeats a run.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import statistics
import time

import pytest
from learning import KNOWN_SECONDS, SLACK_SECONDS, learned_by, learns
from overlay_jobs import until

pytestmark = pytest.mark.timeout(900)

HOSTS = [4, 4, 4, 4]
#: Of the join.  Who dies before anybody has heard of him is missed at the deadline only.
DEADLINE = 2.5
#: The root has this long to answer who is missing; an agent that says nothing, 3 s longer.
ANSWER_SECONDS = 2.0


def start(job, order, **env):
    began = time.monotonic()
    for rank in order:
        job.start(rank, learns, DEADLINE, env=env)
    return began


def time_of_a_join(jobs, shuffled):
    """Seconds from the first process's start to the last one's joining."""
    with jobs(HOSTS) as job:
        began = start(job, shuffled)
        job.expect(*range(job.world))
        seconds = time.monotonic() - began
        job.tell(*range(job.world))
        job.values()
    return seconds


def pick(job, chance):
    """A rank, or an agent that there is by now: (words that name it, its pid, its host)."""
    agents = job.agents()
    if agents and chance.random() < 0.5:
        pid, name = chance.choice(sorted(agents.items()))
        return (name,), pid, int(name.rpartition("-")[2]), None
    rank = chance.choice(sorted(job.ranks))
    return (f"rank {rank} ",), job.ranks[rank].pid, job.host_of(rank), rank


def check_world(job, began, killed, words, host, victim, story):
    """What each live rank says; the number of those that learned only at the deadline."""
    live = [rank for rank in job.ranks if rank != victim]
    learned = learned_by(job, *live)
    of_host = [rank for rank in range(job.world) if job.host_of(rank) == host]
    late = 0
    for rank, one in learned.items():
        where = f"{story}: rank {rank}: {one.kind} after {one.at - killed:.2f} s: {one.text!r}"
        assert one.where, f"{where}: was told nothing"
        if one.kind == "JoinTimeout":
            # Before the root had heard of the victim: it is missing, or the root is.  Who came so
            # late that it may be of the next attempt has heard at its root of the one that failed.
            late += 1
            names = [f"missing: rank{'s' if victim is None else ''}", "the root at", "did not say"]
            names += [f"the last join failed there .*{word}" for word in (*words, f"host-{host}")]
            assert any(re.search(name, one.text) for name in names), where
            assert one.at - began < DEADLINE + ANSWER_SECONDS + 3 + SLACK_SECONDS, where
            continue
        # A host that has lost its agent is named by its ranks, too.
        named = [*words, f"host-{host}", str(job.directory), "agent"]
        assert any(name in one.text for name in named), where
        # The root's death may be met before it has answered once.
        assert one.at - killed < KNOWN_SECONDS + SLACK_SECONDS or one.at - began < DEADLINE, where
        if rank not in of_host and one.where == "world":
            assert any(name in one.text for name in (*words, f"host-{host}")), where
    return late


def test_whoever_is_killed_whenever_nobody_hangs_and_all_know(jobs, request):
    worlds = request.config.getoption("--sweep-worlds")
    seed = request.config.getoption("--sweep-seed") or random.randrange(1 << 32)
    print(f"seed {seed}: pytest --sweep-worlds {worlds} --sweep-seed {seed}")
    chance = random.Random(seed)
    ranks = list(range(sum(HOSTS)))
    chance.shuffle(ranks)
    normal = statistics.median(time_of_a_join(jobs, ranks) for _ in range(3))
    dying, late, unharmed = [], 0, 0
    with contextlib.ExitStack() as left:
        for world in range(worlds):
            job = left.enter_context(_closing(jobs(HOSTS)))
            job.env["COMMKIT_TREE_DEGREE"] = chance.choice(["1", "2", "8"])
            chance.shuffle(ranks)
            when = chance.uniform(0, 1.5 * normal)
            began = start(job, ranks)
            time.sleep(max(0.0, began + when - time.monotonic()))
            words, pid, host, victim = pick(job, chance)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            story = f"seed {seed}, world {world}: {words[0]}killed after {killed - began:.3f} s"
            if victim is None and _replaced(job, killed):
                unharmed += 1  # an agent that was killed before its ranks had spoken to it
                job.tell(*ranks)
                assert all(one.where == "" for one in job.values()), story
            else:
                late += check_world(job, began, killed, words, host, victim, story)
            job.close()
            dying.append((time.monotonic(), job, story))
        for ended, job, story in dying:
            until(lambda job=job: not job.agents(), max(0.1, ended + 10 - time.monotonic()), story)
    print(f"join {normal:.3f} s; {unharmed} worlds lost nothing; {late} ranks heard at a deadline")


@contextlib.contextmanager
def _closing(job):
    """Job without its wait for the agents, which is done for all worlds together."""
    try:
        yield job
    finally:
        job.close()
        for pid in job.agents():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _replaced(job, killed):
    """Whether all ranks are in a world although an agent was killed: another took its place."""
    with contextlib.suppress(AssertionError):
        job.expect(*job.ranks, seconds=DEADLINE + ANSWER_SECONDS + SLACK_SECONDS)
        time.sleep(max(0.0, killed + KNOWN_SECONDS - time.monotonic()))
        return not any(rank.pipe.poll(0) for rank in job.ranks.values())
    return False
