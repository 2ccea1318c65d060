"""Gather, broadcast and agree over the tree: results, sizes, order, deadlines, deaths inside."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from overlay_jobs import until

from commkit import errors

pytestmark = pytest.mark.timeout(300)  # the first test may have to build the sanitized agent

SHAPES = [([3], "8"), ([2, 1, 3], "8"), ([1] * 6, "1"), ([1, 2] * 4, "2")]


def leave(me, world):
    world.barrier(tag="end", timeout=30)
    assert world.leave(10)


def error_of(call, *arguments, **options):
    """(class, text, seconds) of what the call raised."""
    started = time.monotonic()
    with pytest.raises(errors.CommkitError) as caught:
        call(*arguments, **options)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - started


def all_kinds(me):
    world = me.join()
    everybody = [b"from %d" % rank for rank in range(me.world_size)]
    assert world.all_gather(everybody[me.rank], timeout=20) == everybody
    for root in range(me.world_size):
        got = world.gather(everybody[me.rank], dst=root, timeout=20)
        assert got == (everybody if root == me.rank else None)
        sent = everybody[root] if root == me.rank else None
        assert world.broadcast(sent, src=root, timeout=20) == everybody[root]
    world.agree(b"same", "the same plan", timeout=20)
    leave(me, world)


@pytest.mark.parametrize(("hosts", "degree"), SHAPES)
def test_every_rank_may_be_the_root_of_an_operation(checked_jobs, hosts, degree):
    with checked_jobs(hosts, env={"COMMKIT_TREE_DEGREE": degree}) as job:
        job.start_all(all_kinds)
        job.values()


def disagrees(me, odd):
    world = me.join()
    mine = b"odd" if me.rank in odd else b"plan"
    got = error_of(world.agree, mine, f"{mine.decode()} of {me.rank}", timeout=20)
    # A mismatch is an answer, not the end of the world.
    world.agree(b"x", "", timeout=20)
    leave(me, world)
    return got


@pytest.mark.parametrize(
    ("odd", "blamed"), [([4], 4), ([2, 5], 2), ([0], 0)], ids=["one", "two", "rank 0"]
)
def test_a_mismatch_names_the_first_rank_that_differs_and_both_sides(checked_jobs, odd, blamed):
    with checked_jobs([2, 1, 3], env={"COMMKIT_TREE_DEGREE": "1"}) as job:
        job.start_all(disagrees, odd)
        values = job.values()
    for kind, text, _ in values:
        assert kind == "DigestMismatch"
        assert f"rank {blamed} " in text and f"odd of {blamed}" in text and "plan of" in text
        assert f"host-{job.host_of(blamed)}" in text
    assert len({text for _, text, _ in values}) == 1


def other_order(me):
    world = me.join()
    tags = ["a", "b", "c", "d"]
    mine = tags[me.rank % 4 :] + tags[: me.rank % 4]
    got = {}
    # Every rank begins with another tag: one thread a tag, since an operation blocks.
    threads = [
        threading.Thread(
            target=lambda tag=tag: got.update(
                {tag: world.all_gather(f"{tag}{me.rank}".encode(), tag=tag, timeout=20)}
            )
        )
        for tag in mine
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leave(me, world)
    return got


def test_tags_pair_operations_whatever_order_the_ranks_come_in(jobs):
    with jobs([2, 3]) as job:
        job.start_all(other_order)
        for got in job.values():
            assert got == {t: [f"{t}{rank}".encode() for rank in range(5)] for t in "abcd"}


def same_tag_from_threads(me):
    world = me.join()
    failures: list[BaseException] = []

    def work():
        try:
            for _ in range(25):
                assert len(world.all_gather(b"x", tag="shared", timeout=20)) == me.world_size
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    leave(me, world)


def test_threads_of_a_rank_may_use_one_tag_at_once(jobs):
    with jobs([2, 1]) as job:
        job.start_all(same_tag_from_threads)
        job.values()


def misses(me, missing, kind):
    world = me.join()
    if me.rank in missing:
        me.meet()
        got = None
    else:
        if kind == "gather":
            call = lambda: world.gather(b"", dst=0, tag="step", timeout=0.5)  # noqa: E731
        elif kind == "broadcast":
            call = lambda: world.broadcast(None, src=3, tag="step", timeout=0.5)  # noqa: E731
        else:
            call = lambda: world.agree(b"", "", tag="step", timeout=0.5)  # noqa: E731
        got = None if kind == "gather" and me.rank != 0 else error_of(call)
        if kind == "gather" and me.rank != 0:
            call()
        me.meet()
    world.leave(1)
    return got


@pytest.mark.parametrize("kind", ["agree", "broadcast", "gather"])
def test_the_deadline_of_an_operation_names_who_did_not_come(jobs, kind):
    missing = [3, 4]
    with jobs([1, 2, 2, 1], env={"COMMKIT_TREE_DEGREE": "1"}) as job:
        job.start_all(misses, missing, kind)
        job.expect(*range(6))
        job.tell(*range(6))
        values = [value for value in job.values() if value]
    assert len(values) == (1 if kind == "gather" else 4)
    for name, text, _ in values:
        assert name == "OverlayTimeout" and "'step'" in text
        assert "ranks 3-4 did not come" in text and "host-2" in text
        assert "host-0" not in text and "host-3" not in text


def comes_late(me):
    world = me.join()
    if me.rank == 1:
        me.meet()
    got = error_of(world.agree, b"", "", tag="step", timeout=15 if me.rank == 1 else 0.3)
    me.meet()
    world.leave(1)
    return got


def test_a_rank_that_comes_after_the_deadline_learns_so_at_once(jobs):
    with jobs([1, 1, 1]) as job:
        job.start_all(comes_late)
        job.expect(1, 0, 2)
        job.tell(1)
        job.expect(1)
        job.tell(0, 1, 2)
        _, text, seconds = job.values()[1]
    assert "'step'" in text
    assert seconds < 14, "it waited for its own deadline, though the operation had failed"


def gives_and_goes_on(me):
    world = me.join()
    if me.rank == 1:
        assert world.gather(b"given", dst=0, timeout=0.3) is None
    me.meet()
    if me.rank == 0:
        time.sleep(0.6)  # past the giver's deadline, not the receiver's
        assert world.gather(b"own", dst=0, timeout=10) == [b"own", b"given"]
    leave(me, world)


@pytest.mark.parametrize("hosts", [[2], [1, 1]])
def test_what_a_rank_gave_is_kept_past_its_own_deadline(jobs, hosts):
    with jobs(hosts) as job:
        job.start_all(gives_and_goes_on)
        job.expect(0, 1)
        job.tell(0, 1)
        job.values()


def wrong_root(me):
    world = me.join()
    got = []
    for number in (99, -2):
        got.append(error_of(world.gather, b"x", dst=number, tag=f"g{number}", timeout=2))
        got.append(error_of(world.broadcast, b"x", src=number, tag=f"b{number}", timeout=2))
    world.leave(5)
    return got


def test_a_root_outside_the_world_is_refused_with_its_number(jobs):
    with jobs([2]) as job:
        job.start_all(wrong_root)
        for value in job.values():
            for (kind, text, _), number in zip(value, (99, 99, -2, -2), strict=True):
                assert kind == "UsageError" and str(number) in text and "2" in text


def dies_inside(me):
    world = me.join()
    if me.rank == 2:
        me.meet()
        return None
    me.say()
    got = error_of(world.all_gather, b"", timeout=30)
    later = error_of(world.barrier, timeout=30)
    world.leave(1)
    return got, later


@pytest.mark.parametrize("degree", ["1", "8"])
def test_a_death_inside_an_operation_ends_it_for_everybody(checked_jobs, degree):
    with checked_jobs([1, 1, 2, 1], env={"COMMKIT_TREE_DEGREE": degree}) as job:
        job.start_all(dies_inside)
        job.expect(*range(5))
        job.kill(2)
        pid = job.ranks[2].pid
        for (kind, text, seconds), (later_kind, later_text, _) in job.values(0, 1, 3, 4):
            assert kind == later_kind == "RankDied" and seconds < 20
            for part in ("rank 2", f"pid {pid}", "host-2", "signal 9"):
                assert part in text and part in later_text


def killed_many_times(me):
    world = me.join()
    me.meet()
    until(world.failures, 10)
    failures = world.failures()
    world.leave(1)
    return failures


def test_how_a_rank_died_is_told_every_time(jobs):
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM) * 4:
        with jobs([2]) as job:
            job.start_all(killed_many_times)
            job.expect(0, 1)
            job.kill(1, number)
            job.tell(0)
            [text] = job.values(0)[0]
            assert f"killed by signal {int(number)}" in text, text


def sizes(me):
    world = me.join()
    for size in (0, 1, 65_535, 65_536, 8 << 20):
        block = bytes([me.rank]) * size
        assert world.all_gather(block, timeout=50) == [bytes([r]) * size for r in range(3)]
        sent = block if me.rank == 1 else None
        assert world.broadcast(sent, src=1, timeout=50) == b"\1" * size
        got = world.gather(block, dst=2, timeout=50)
        assert got == ([bytes([r]) * size for r in range(3)] if me.rank == 2 else None)
    leave(me, world)


def test_payloads_of_0_bytes_to_8_mib_arrive_unchanged(jobs):
    with jobs([1, 1, 1], env={"COMMKIT_TREE_DEGREE": "1"}) as job:
        job.start_all(sizes)
        job.values()


def many_in_a_row(me):
    world = me.join()
    for turn in range(200):
        got = world.all_gather(b"%d/%d" % (me.rank, turn), timeout=20)
        assert got == [b"%d/%d" % (rank, turn) for rank in range(me.world_size)]
    leave(me, world)


def test_two_hundred_operations_in_a_row(jobs):
    with jobs([2, 1, 1, 1], env={"COMMKIT_TREE_DEGREE": "2"}) as job:
        job.start_all(many_in_a_row)
        job.values()


def with_a_stopped_agent(me):
    world = me.join()
    me.meet(world.identity.agent_pid)
    got = error_of(world.broadcast, b"x" * (8 << 20), timeout=1)
    me.say()
    return got


def test_a_large_payload_to_an_agent_that_is_stopped_ends_at_the_deadline(jobs):
    with jobs([2], deadline=25.0) as job:
        job.start_all(with_a_stopped_agent)
        [agent, _] = job.expect(0, 1)
        os.kill(agent, signal.SIGSTOP)
        try:
            job.tell(0)
            job.expect(0, seconds=15)
        finally:
            os.kill(agent, signal.SIGCONT)
            job.kill(1)
        [(kind, text, _)] = job.values(0)
        assert kind == "OverlayTimeout" and "broadcast" in text


def uses_a_tag_otherwise(me):
    world = me.join()
    if me.rank == 1:
        got = error_of(world.agree, b"x", "", tag="mixed", timeout=3)
    else:
        got = error_of(world.all_gather, b"x", tag="mixed", timeout=3)
    world.leave(1)
    return got


@pytest.mark.parametrize("hosts", [[2], [1, 1]])
def test_one_tag_for_two_kinds_of_operation_is_an_error_that_names_it(jobs, hosts):
    with jobs(hosts) as job:
        job.start_all(uses_a_tag_otherwise)
        kinds = [(kind, "mixed" in text) for kind, text, _ in job.values()]
    assert all(named for _, named in kinds)
    assert "UsageError" in [kind for kind, _ in kinds]


def wrong_members(me):
    world = me.join()
    with pytest.raises(errors.UsageError, match="99"):
        world.connected("pair", [me.rank, 99])
    with pytest.raises(errors.UsageError, match=str(2**31 - 1)):
        world.connected("pair", [me.rank, 2**31 - 1])
    return world.leave(10)


def test_a_group_with_a_member_outside_the_world_is_refused(jobs):
    with jobs([1, 1]) as job:
        job.start_all(wrong_members)
        job.values()
