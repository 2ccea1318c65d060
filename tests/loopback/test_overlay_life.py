"""Deaths, leaving, the next epoch, and how long an agent lives."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time

import pytest
from overlay_jobs import until

from commkit import _C, errors

pytestmark = pytest.mark.timeout(300)  # the first test may have to build the sanitized agent
DEEP = {"COMMKIT_TREE_DEGREE": "1"}


def in_world(me):
    """Joins, and leaves when it is told."""
    world = me.join()
    me.meet(world.identity.agent_pid)
    return world.leave(5)


def watches(me):
    """What this rank has heard when it is told to look."""
    world = me.join()
    me.meet(world.identity.agent_pid)
    with_reason = until(world.failures, 20)
    told = [text for kind, text in me.notices if kind == "died"]
    world.leave(1)
    return list(with_reason), told


# --- In and out ------------------------------------------------------------------------------


def ten_cycles(me):
    def counts():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    epochs, before = [], None
    for turn in range(10):
        world = me.join()
        epochs.append(world.identity.epoch)
        assert not world.keys.check([f"commkit:{me.rank}/x"], 5), "a key outlived its epoch"
        world.keys.set(f"commkit:{me.rank}/x", b"%d" % turn, 5)
        world.all_gather(b"x", timeout=20)
        world.connected("world", range(me.world_size))
        assert world.leave(10)
        if turn == 0:
            before = counts()
    assert counts() == before
    with pytest.raises(errors.UsageError, match="left"):
        world.all_gather(b"x")
    assert world.leave(1) is False
    return epochs


@pytest.mark.parametrize("hosts", [[1], [3], [2, 1, 2]])
def test_ten_cycles_leak_nothing_and_have_ten_epochs(checked_jobs, hosts):
    with checked_jobs(hosts) as job:
        job.start_all(ten_cycles)
        values = job.values()
    assert all(value == values[0] for value in values)
    assert len(set(values[0])) == 10


def quits_at_once(me):
    world = me.join()
    if me.rank != 0:
        os._exit(0)
    world.leave(5)


def test_agents_of_a_world_that_lived_for_milliseconds_leave_too(checked_jobs):
    for _ in range(3):
        with checked_jobs([1, 1, 1]) as job:
            job.start_all(quits_at_once)
            job.outcomes()


def rejoins(me):
    world = me.join()
    first = world.identity.epoch
    if me.rank != 0:
        world.leave(5)
        me.say()
        second = me.join(30).identity.epoch
        return first, second
    me.meet()
    assert world.keys.add("still", 1, 5) == 1
    world.leave(5)
    return first, me.join(30).identity.epoch


def test_rejoining_while_another_host_is_in_the_old_world_gives_the_next_epoch(checked_jobs):
    with checked_jobs([1, 1, 2], env=DEEP) as job:
        job.start_all(rejoins)
        job.expect(*range(4))
        job.tell(0)
        values = job.values()
    assert len(set(values)) == 1 and values[0][0] != values[0][1]


def rank_0_rejoins_last(me):
    world = me.join()
    if me.rank == 1:
        world.leave(5)
        me.say()
        return me.join(20).leave(5)
    me.meet()
    world.leave(5)
    me.meet()
    time.sleep(0.3)  # rank 1's new world looks for its root: at the port of its own agent
    return me.join(20).leave(5)


@pytest.mark.parametrize("hosts", [[2], [2, 1]])
def test_rank_0_may_come_back_after_its_neighbours(checked_jobs, hosts):
    with checked_jobs(hosts) as job:
        job.start_all(rank_0_rejoins_last if len(hosts) == 1 else rank_0_of_two_hosts)
        job.expect(0, 1)
        job.tell(0)
        job.expect(0)
        job.tell(0)
        job.values()


def rank_0_of_two_hosts(me):
    if me.rank < 2:
        return rank_0_rejoins_last(me)
    me.join().leave(5)
    return me.join(20).leave(5)


def waits_for_old_world(me):
    world = me.join()
    if me.rank == 0:
        me.meet()
        world.leave(5)
        return ""
    world.leave(5)
    with pytest.raises(errors.JoinTimeout) as caught:
        me.join(1.0)
    return str(caught.value)


@pytest.mark.parametrize("hosts", [[2], [1, 1]])
def test_a_rank_kept_out_by_the_old_world_learns_who_is_in_it(checked_jobs, hosts):
    with checked_jobs(hosts) as job:
        job.start_all(waits_for_old_world)
        [text] = job.values(1)
        job.tell(0)
        job.values()
        assert "rank 0" in text and "host-0" in text and str(job.ranks[0].pid) in text


# --- Deaths ----------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", ["1", "8"])
def test_a_killed_rank_is_announced_on_every_host(checked_jobs, degree):
    with checked_jobs([1, 2, 1, 1], env={"COMMKIT_TREE_DEGREE": degree}) as job:
        job.start_all(watches)
        job.expect(*range(5))
        job.kill(2)
        job.tell(0, 1, 3, 4)
        for failures, told in job.values(0, 1, 3, 4):
            assert failures == told and len(told) == 1
            for part in ("rank 2", f"pid {job.ranks[2].pid}", "host-1", "signal 9"):
                assert part in told[0]


def raises(me):
    me.join()
    me.meet()
    raise ValueError("the loss is not a number")


def exits_without_leaving(me):
    me.join()
    me.meet()
    sys.exit(0)


def exits_with_code(me):
    me.join()
    me.meet()
    sys.exit(7)


@pytest.mark.parametrize(
    ("body", "said"),
    [(raises, "ValueError: the loss is not a number"), (exits_with_code, "exited with code 7")],
)
def test_a_rank_that_fails_is_announced_with_its_reason(checked_jobs, body, said):
    with checked_jobs([2, 1]) as job:
        job.start(0, watches)
        job.start(2, watches)
        job.start(1, body)
        job.expect(0, 1, 2)
        job.tell(0, 1, 2)
        for failures, _ in job.values(0, 2):
            assert len(failures) == 1 and "rank 1 " in failures[0] and said in failures[0]


def hears_nothing(me):
    world = me.join()
    me.meet()
    # A frame behind the exit's own: by its end the agent has told what there was to tell.
    with pytest.raises(errors.RankDied, match="rank 1 has exited"):
        world.barrier(timeout=20)
    failures = world.failures()
    world.leave(1)
    return failures


def test_exit_with_code_0_and_without_leaving_is_no_failure(checked_jobs):
    with checked_jobs([2, 1]) as job:
        job.start(0, hears_nothing)
        job.start(2, hears_nothing)
        job.start(1, exits_without_leaving)
        job.expect(0, 1, 2)
        job.tell(1)
        job.outcomes(1)
        job.tell(0, 2)
        assert job.values(0, 2) == [[], []]


# --- Forks -----------------------------------------------------------------------------------


def forks(me):
    world = me.join()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = "could use it"
        for call in (
            lambda: world.barrier(timeout=1),
            lambda: world.keys.set("k", b"v", 1),
            lambda: world.connected("g", [0, 1]),
        ):
            try:
                call()
                break
            except (errors.UsageError, _C.Failure) as error:
                text = str(error)
        world.leave(1)
        os.write(writing, text.encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    text = os.read(reading, 4096).decode()
    assert "forked" in text, text
    assert world.all_gather(b"%d" % me.rank, timeout=20) == [b"0", b"1"]
    world.connected("world", [0, 1])
    return world.leave(10)


def test_a_forked_child_cannot_use_the_world_and_its_parent_still_can(checked_jobs):
    with checked_jobs([1, 1]) as job:
        job.start_all(forks)
        assert job.values() == [True, True]


def leaves_a_worker(me):
    me.join()
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    me.meet(worker.pid)


def test_a_worker_that_lives_on_does_not_hide_the_death_of_its_rank(checked_jobs):
    with checked_jobs([1, 1]) as job:
        job.start(0, watches)
        job.start(1, leaves_a_worker)
        worker = job.expect(0, 1)[1]
        try:
            job.kill(1)
            job.tell(0)
            [(failures, _)] = job.values(0)
            assert "rank 1" in failures[0]
            job.wait_for_agents_to_leave()
        finally:
            os.kill(worker, signal.SIGKILL)


# --- The fence -------------------------------------------------------------------------------


def fence(me, group):
    world = me.join()
    if me.rank == 1:
        me.meet()
    if me.rank in group:
        world.connected("pair", group)
    started = time.monotonic()
    open_ = world.leave(20 if me.rank in group else 10)
    return open_, time.monotonic() - started


@pytest.mark.parametrize("group", [[0, 1, 2, 3], [1, 2], [0, 1, 3]])
def test_leave_waits_until_the_members_of_its_groups_are_connected(checked_jobs, group):
    with checked_jobs([1, 1, 2]) as job:
        job.start_all(fence, group)
        job.expect(1)
        others = [rank for rank in range(4) if rank not in group]
        if others:
            assert all(open_ for open_, _ in job.values(*others)), "nothing holds these"
        waiting = [rank for rank in group if rank != 1]
        assert not any(job.ranks[rank].pipe.poll(0.3) for rank in waiting)
        job.tell(1)
        assert all(open_ for open_, _ in job.values())


def fence_deadline(me):
    world = me.join()
    if me.rank == 1:
        me.meet()
    else:
        world.connected("pair", [0, 1])
    got = world.leave(0.4)
    me.say()
    return got


def test_leave_gives_up_at_its_deadline_and_says_so(checked_jobs):
    with checked_jobs([1, 1]) as job:
        job.start_all(fence_deadline)
        job.expect(0, 1)
        job.tell(1)
        assert job.values() == [False, True]


def test_a_death_opens_the_fence(checked_jobs):
    with checked_jobs([1, 1, 1]) as job:
        job.start(0, fence, [0, 1])
        job.start(1, fence, [0, 1])
        job.start(2, in_world)
        job.expect(1, 2)
        job.kill(1)
        [(open_, _)] = job.values(0)
        assert open_ is False
        job.tell(2)
        job.values(2)
