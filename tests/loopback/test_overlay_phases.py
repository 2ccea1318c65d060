"""A rank or an agent is killed at each phase of a join: who is alive knows it within 2 s.

A phase is held, not hoped for: by a rank that has not come, by an agent that is stopped, by an
agent program that does not go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time

import pytest
from learning import KNOWN_SECONDS, SLACK_SECONDS, check, learned_by, learns
from overlay_jobs import Job, free_port, until

from commkit import overlay

#: A stopped agent is not to be missed by its silence, however slow the machine.
DEEP = {"COMMKIT_TREE_DEGREE": "1", "COMMKIT_HEARTBEAT": "60"}


def name(victim):
    return "{}{}".format(*victim)


def kill(job, victim):
    """SIGKILL for ("rank", number) or ("agent", host); the time, and words that name the victim."""
    kind, number = victim
    if kind == "rank":
        pid = job.ranks[number].pid
        words = (f"rank {number} (pid {pid} on host host-{job.host_of(number)})",)
    else:
        pid, words = job.agent_of(number), (f"host-{number}",)
    os.kill(pid, signal.SIGKILL)
    return time.monotonic(), words


def check_all(job, victim, killed, words, but=()):
    live = [rank for rank in job.ranks if ("rank", rank) != victim and rank not in but]
    learned = learned_by(job, *live)
    orphaned = [rank for rank in live if ("agent", job.host_of(rank)) == victim]
    check({rank: one for rank, one in learned.items() if rank not in orphaned}, killed, *words)
    # Those on the host itself are told where its log is.
    check({rank: learned[rank] for rank in orphaned}, killed, str(job.directory), "agent")


@pytest.fixture
def worlds(rank_server, tmp_path):
    """worlds(victims, hosts): (victim, job) for each victim, all alive at the same time.

    An agent lingers for 3 s after a join that has failed: theirs do so together.
    """
    with contextlib.ExitStack() as stack:

        def make(victims, hosts, **options):
            made = []
            for victim in victims:
                directory = tmp_path / name(victim)
                directory.mkdir()
                job = Job(rank_server, directory, hosts, **options)
                made.append((victim, stack.enter_context(job)))
            return made

        yield make


# --- The agent starts ------------------------------------------------------------------------


@pytest.fixture
def slow_agent(tmp_path):
    """An agent program that goes on when a file is there; (program, file)."""
    program, go = tmp_path / "slow-agent", tmp_path / "go"
    program.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/started\n"
        f'while [ ! -e {go} ]; do sleep 0.02; done\nexec {overlay.AGENT} "$@"\n'
    )
    program.chmod(0o755)
    return str(program), go


def pid_of_start(tmp_path):
    path = tmp_path / "started"
    return int(until(lambda: path.exists() and path.read_text().strip()))


def test_an_agent_killed_while_it_starts_is_named_with_its_signal(jobs, slow_agent, tmp_path):
    with jobs([2], agent=slow_agent[0]) as job:
        job.start(0, learns)
        pid = pid_of_start(tmp_path)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        check(learned_by(job, 0), killed, f"{slow_agent[0]} ended at once: signal 9")


def test_an_agent_that_never_gets_ready_is_given_up_at_the_deadline(jobs, slow_agent):
    with jobs([2], agent=slow_agent[0]) as job:
        began = time.monotonic()
        job.start(0, learns, 2.0)
        job.start(1, learns, 2.0)
        learned = learned_by(job, 0, 1)
    check(learned, began + 2.0, f"{slow_agent[0]} was not ready", "agent", within=6.5)
    assert {one.kind for one in learned.values()} <= {"OverlayError", "JoinTimeout"}


def interrupted(me):
    me.say()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        me.join(30)
    return time.monotonic() - started


def test_an_interrupt_is_heard_while_the_agent_starts(jobs, slow_agent, tmp_path):
    with jobs([1], agent=slow_agent[0]) as job:
        job.start(0, interrupted)
        job.expect(0)
        pid_of_start(tmp_path)
        job.kill(0, signal.SIGINT)
        assert job.values(0)[0] < 20


def test_a_rank_killed_while_its_agent_starts_leaves_an_agent_to_the_others(
    jobs, slow_agent, tmp_path
):
    with jobs([3], agent=slow_agent[0]) as job:
        job.start(2, learns, 2.5)
        pid_of_start(tmp_path)
        for rank in (0, 1):
            job.start(rank, learns, 2.5)
        job.kill(2)
        slow_agent[1].touch()
        # It had not said which rank it was: it is missing.
        learned = learned_by(job, 0, 1)
    for one in learned.values():
        assert one.kind == "JoinTimeout" and "missing: rank 2" in one.text


def test_a_rank_killed_between_its_agent_s_start_and_its_first_word_leaves_no_agent(
    jobs, slow_agent, tmp_path
):
    with jobs([1], agent=slow_agent[0]) as job:
        job.start(0, learns)
        pid_of_start(tmp_path)
        job.kill(0)
        until(lambda: (job.server.pump(0.05), job.ranks[0].pid in job.server.codes)[1])
        slow_agent[1].touch()
        job.agent_of(0)
        until(lambda: not job.agents(), 10, "the agent leaves though nobody ever came")


# --- Looking for the root --------------------------------------------------------------------


def test_a_death_before_the_root_is_there(worlds):
    jobs = worlds([("rank", 1), ("agent", 1)], [1, 2])
    for _, job in jobs:
        for rank in (1, 2):
            job.start(rank, learns)
        until(lambda job=job: "ranks 1-2 have come" in job.log_text())
    time.sleep(0.3)  # their agent has told them that they are taken
    for victim, job in jobs:
        killed, words = kill(job, victim)
        check_all(job, victim, killed, words)
        # A root that comes now still hears of it.
        began = time.monotonic()
        job.start(0, learns)
        check(learned_by(job, 0), began, *words)


# --- Some have joined ------------------------------------------------------------------------

VICTIMS = [("rank", 1), ("rank", 2), ("rank", 5), ("agent", 0), ("agent", 1), ("agent", 2)]


@pytest.mark.parametrize("degree", ["1", "8"])
def test_a_death_while_a_rank_is_still_missing(worlds, degree):
    jobs = worlds(VICTIMS, [2, 2, 3], env={"COMMKIT_TREE_DEGREE": degree})
    for _, job in jobs:
        for rank in range(6):  # rank 6 does not come
            job.start(rank, learns)
    for _, job in jobs:
        until(lambda job=job: job.log_text().count(", parent ") == 2)
    time.sleep(0.3)  # all six have been taken in
    for victim, job in jobs:
        check_all(job, victim, *kill(job, victim))


# --- Placed, and not yet under a parent ------------------------------------------------------


def test_a_death_while_a_host_has_a_place_and_no_parent_yet(worlds):
    victims = [("rank", 2), ("rank", 3), ("agent", 0), ("agent", 1), ("agent", 2)]
    jobs = worlds(victims, [1, 1, 2, 1], env=DEEP)
    for _, job in jobs:
        for rank in (0, 1):
            job.start(rank, learns)
    for _, job in jobs:
        until(lambda job=job: ", parent 0" in job.log_text(1))
        until(lambda job=job: "listening on port" in job.log_text(1))
        time.sleep(0.1)  # it has said so to the root
        os.kill(job.agent_of(1), signal.SIGSTOP)
        for rank in (2, 3):
            job.start(rank, learns)
    for _, job in jobs:
        until(lambda job=job: ", parent 1" in job.log_text(2))
    time.sleep(0.3)
    for victim, job in jobs:
        parent = job.agent_of(1)
        killed, words = kill(job, victim)
        if victim == ("agent", 1):
            check_all(job, victim, killed, words)
            continue
        check_all(job, victim, killed, (*words, "the root"), but=[1])
        # The rank whose agent stood still.
        os.kill(parent, signal.SIGCONT)
        check(learned_by(job, 1), time.monotonic(), *words, "the root")


def of_several_ports(me, ports):
    spec = me.spec()
    root = dataclasses.replace(spec.root, kind="endpoint", ports=tuple(ports))
    world = overlay.join(dataclasses.replace(spec, root=root), 40)
    world.barrier(timeout=20)
    return world.leave(10)


def test_connections_that_a_host_has_given_up_do_not_end_the_join(jobs):
    """Of several ports the first is left after half a second; the root wakes up later."""
    with jobs([1, 1, 1]) as job:
        ports = [free_port(), free_port()]
        job.start(0, of_several_ports, ports)
        until(lambda: f"listening on port {ports[0]}" in job.log_text(0))
        root = job.agent_of(0)
        os.kill(root, signal.SIGSTOP)
        job.start(1, of_several_ports, ports)
        until(lambda: "rank 1 have come" in job.log_text(1))
        time.sleep(3)  # two or three connections, of which one is still wanted
        os.kill(root, signal.SIGCONT)
        time.sleep(2)
        job.start(2, of_several_ports, ports)
        assert job.values() == [True] * 3


# --- The epoch exists, and not everybody knows it --------------------------------------------


def chain_without_rank_1(jobs):
    """host-1 stands still between host-2 and the root, and only rank 1 has not come yet."""
    for host, ranks in enumerate(([0], [2], [3, 4])):
        for _, job in jobs:
            for rank in ranks:
                job.start(rank, learns)
        for _, job in jobs:
            until(lambda job=job, host=host: job.log_text().count(", parent ") == host)
    time.sleep(0.3)
    stopped = []
    for _, job in jobs:
        stopped.append(job.agent_of(1))
        os.kill(stopped[-1], signal.SIGSTOP)
    return stopped


def test_a_death_that_is_underway_when_the_world_forms(worlds):
    """host-1 reads of the death first, and then that there is an epoch."""
    jobs = worlds([("rank", 3), ("agent", 2)], [2, 1, 2], env=DEEP)
    stopped = chain_without_rank_1(jobs)
    for rank in (3, 4):  # whose agent is killed would have a new one tell the root
        jobs[1][1].kill(rank, signal.SIGSTOP)
    killed = [kill(job, victim) for victim, job in jobs]
    time.sleep(0.3)  # what host-2 has to say lies at host-1
    for _, job in jobs:
        job.start(1, learns)
        job.expect(0, 1)
    for rank in (3, 4):
        jobs[1][1].kill(rank, signal.SIGCONT)
    for pid, (_, words), (victim, job) in zip(stopped, killed, jobs, strict=True):
        os.kill(pid, signal.SIGCONT)
        check_all(job, victim, time.monotonic(), words)


def test_a_death_while_the_news_of_the_epoch_is_underway(worlds):
    victims = [("rank", 3), ("agent", 2), ("agent", 1), ("agent", 0)]
    jobs = worlds(victims, [2, 1, 2], env=DEEP)
    stopped = chain_without_rank_1(jobs)
    for _, job in jobs:
        job.start(1, learns)
        job.expect(0, 1)
    killed = [kill(job, victim) for victim, job in jobs]
    time.sleep(0.3)
    for pid, (at, words), (victim, job) in zip(stopped, killed, jobs, strict=True):
        if victim != ("agent", 1):
            os.kill(pid, signal.SIGCONT)
            at = time.monotonic()
        check_all(job, victim, at, words)


def test_a_deadline_that_passes_while_the_world_forms_leaves_nobody_behind(worlds):
    """host-2 has asked who is missing; the answer is the world: it stays in it, and is missed."""
    [(_, job)] = worlds([("rank", 3)], [2, 1, 2], env=DEEP)
    for rank in (0, 2):
        job.start(rank, learns)
    until(lambda: ", parent 0" in job.log_text())
    began = time.monotonic()
    for rank in (3, 4):
        job.start(rank, learns, 2.5)
    until(lambda: ", parent 1" in job.log_text() and "ranks 3-4 have come" in job.log_text())
    time.sleep(0.3)
    between = job.agent_of(1)
    os.kill(between, signal.SIGSTOP)
    time.sleep(max(0.0, began + 3.0 - time.monotonic()))
    job.start(1, learns)
    job.expect(0, 1)
    os.kill(between, signal.SIGCONT)
    job.expect(2, 3, 4)
    time.sleep(0.3)
    check_all(job, ("rank", 3), *kill(job, ("rank", 3)))


# --- The world has formed --------------------------------------------------------------------


def test_a_death_just_after_the_join(worlds):
    jobs = worlds(VICTIMS, [2, 2, 2], env=DEEP)
    for _, job in jobs:
        job.start_all(learns)
    for victim, job in jobs:
        job.expect(*range(6))
        check_all(job, victim, *kill(job, victim))


def leaves(me):
    world = me.join(40)
    if me.rank == 3:
        me.meet()  # never confirms that it is connected
    world.connected("default", range(me.world_size))
    me.say("leaving")
    opened = world.leave(30)
    return opened, time.monotonic()


def test_a_death_while_the_others_leave_opens_the_fence(worlds):
    jobs = worlds([("rank", 3), ("agent", 1), ("agent", 0)], [2, 2])
    for _, job in jobs:
        job.start_all(leaves)
    for victim, job in jobs:
        job.expect(*range(4))
        time.sleep(0.1)
        killed, _ = kill(job, victim)
        for opened, at in job.values(0, 1, 2):
            assert opened is False and at - killed < KNOWN_SECONDS + SLACK_SECONDS


def test_the_next_run_of_the_same_job_does_not_meet_the_one_that_was_killed(jobs):
    """The same job id, port and hosts, while agents of the run before are still dying."""
    with jobs([2, 2]) as job:
        job.start_all(learns)
        job.expect(*range(4))
        for turn in range(3):
            for rank in job.ranks.values():
                os.kill(rank.pid, signal.SIGKILL)
            job.start_all(learns)
            job.expect(*range(4), seconds=15)
            assert job.log_text().count("the world has formed") == turn + 2
        job.tell(*range(4))
        assert [one.where for one in job.values()] == [""] * 4


def join_that_fails(job):
    """Ranks 0 and 1 of host-0, of which 1 is killed while rank 2 is missing; words that name it."""
    for rank in (0, 1):
        job.start(rank, learns)
    until(lambda: "ranks 0-1 have come" in job.log_text(0))
    time.sleep(0.3)
    victim = ("rank", 1)
    killed, words = kill(job, victim)
    check_all(job, victim, killed, words, but=[2])
    return words


def test_a_host_that_looked_for_the_root_before_the_join_failed_hears_that_it_has(jobs):
    """Its first hello is older than the failure; the one that arrives says how old by now."""
    with jobs([2, 1]) as job:
        job.start(2, learns)
        until(lambda: "rank 2 have come" in job.log_text(1))
        time.sleep(0.2)
        late = job.agent_of(1)
        os.kill(late, signal.SIGSTOP)
        words = join_that_fails(job)
        time.sleep(0.5)
        os.kill(late, signal.SIGCONT)
        check(learned_by(job, 2), time.monotonic(), *words)


def test_a_host_whose_agent_was_starting_when_the_join_failed_hears_that_it_has(
    jobs, slow_agent, tmp_path
):
    with jobs([2, 1]) as job:
        job.start(2, learns, agent=slow_agent[0])
        pid_of_start(tmp_path)
        words = join_that_fails(job)
        time.sleep(0.5)
        slow_agent[1].touch()
        check(learned_by(job, 2), time.monotonic(), *words)


def joins_when_told(me):
    me.meet()
    return learns(me)


def test_a_process_that_started_before_the_join_failed_and_speaks_after_it_hears_that_it_has(jobs):
    with jobs([2, 1]) as job:
        job.start(2, joins_when_told)
        job.expect(2)
        words = join_that_fails(job)
        job.tell(2)
        check(learned_by(job, 2), time.monotonic(), *words)


@pytest.mark.parametrize("deadline", [1.0, 5.0])
def test_a_process_that_started_after_the_join_failed_waits_for_the_next_and_knows_why(
    jobs, deadline
):
    """When its deadline comes, the agent that knows has left, or has not."""
    with jobs([2, 1]) as job:
        words = join_that_fails(job)
        time.sleep(0.1)
        job.start(2, learns, deadline)
        [late] = job.values(2)
    assert late.kind == "JoinTimeout" and words[0] in late.text
    assert "since the last join failed there" in late.text
