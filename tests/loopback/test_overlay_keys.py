"""Keys over the tree: what every operation does, who owns a key, what survives its owner."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from overlay_jobs import until

from commkit import _C, errors, overlay

pytestmark = pytest.mark.timeout(300)  # the first test may have to build the sanitized agent
DEEP = {"COMMKIT_TREE_DEGREE": "1"}  # every agent but the last is interior


def leave(me, world):
    """Nobody leaves before all have done what they wanted."""
    world.barrier(tag="end", timeout=30)
    assert world.leave(10)


def refusal(call, *arguments):
    with pytest.raises(_C.Failure) as caught:
        call(*arguments)
    return caught.value.args


def every_operation(me):
    world = me.join()
    keys, mine = world.keys, f"of-{me.rank}/".encode()
    keys.set(mine + b"a", b"one", 5)
    assert keys.get([mine + b"a"], 5) == [b"one"]
    keys.set(mine + b"a", b"two", 5)
    assert keys.get([mine + b"a", mine + b"a"], 5) == [b"two", b"two"]
    assert keys.check([mine + b"a"], 5) and not keys.check([mine + b"a", mine + b"b"], 5)
    assert keys.add(mine + b"n", 5, 5) == 5 and keys.add(mine + b"n", -7, 5) == -2
    assert keys.get([mine + b"n"], 5) == [b"-2"]
    assert keys.compare_set(mine + b"c", b"", b"first", 5) == b"first"
    assert keys.compare_set(mine + b"c", b"wrong", b"second", 5) == b"first"
    assert keys.compare_set(mine + b"c", b"first", b"second", 5) == b"second"
    keys.append(mine + b"p", b"ab", 5)
    keys.append(mine + b"p", b"cd", 5)
    assert keys.get([mine + b"p"], 5) == [b"abcd"]
    assert keys.delete(mine + b"p", 5) and not keys.delete(mine + b"p", 5)
    assert not keys.check([mine + b"p"], 5)
    keys.queue_push(mine + b"q", b"x", 5)
    keys.queue_push(mine + b"q", b"", 5)
    assert keys.queue_len(mine + b"q", 5) == 2
    assert keys.queue_pop(mine + b"q", True, 5) == b"x"
    assert keys.queue_pop(mine + b"q", False, 5) == b""
    kind, text = refusal(keys.queue_pop, mine + b"q", False, 5)
    assert kind == "timeout" and "q" in text
    kind, text = refusal(keys.add, mine + b"c", 1, 5)
    assert kind == "usage" and "second" in text and "number" in text
    kind, text = refusal(keys.wait, [mine + b"never"], 0.2)
    assert kind == "timeout" and f"of-{me.rank}/never" in text
    kind, text = refusal(keys.queue_pop, mine + b"never", True, 0.2)
    assert kind == "timeout" and f"of-{me.rank}/never" in text
    world.barrier(tag="written", timeout=30)
    assert keys.num_keys(5) == 3 * me.world_size
    assert sorted(keys.list_keys(5)) == sorted(
        f"of-{rank}/{name}".encode() for rank in range(me.world_size) for name in "anc"
    )
    leave(me, world)


@pytest.mark.parametrize("hosts", [[2], [2, 1, 1, 2]])
def test_every_operation_does_what_torch_documents(checked_jobs, hosts):
    with checked_jobs(hosts, env=DEEP) as job:
        job.start_all(every_operation)
        job.values()


def concurrent_sums(me):
    world = me.join()
    for turn in range(200):
        world.keys.add(f"sum-{turn % 7}", 1, 20)
    winner = world.keys.compare_set("race", b"", b"%d" % me.rank, 20)
    world.barrier(tag="added", timeout=30)
    total = sum(world.keys.add(f"sum-{n}", 0, 20) for n in range(7))
    leave(me, world)
    return total, winner


def test_concurrent_adds_sum_up_and_a_compare_set_race_has_one_winner(checked_jobs):
    with checked_jobs([2, 2, 1, 2], env=DEEP) as job:
        job.start_all(concurrent_sums)
        values = job.values()
    assert {total for total, _ in values} == {200 * 7}
    winners = {winner for _, winner in values}
    assert len(winners) == 1 and int(winners.pop()) in range(7)


def many_waiters(me):
    world = me.join()
    if me.rank == 0:
        me.meet()
        world.keys.set("late", b"here", 5)
    else:
        me.say()
        got: list[bytes] = []
        threads = [
            threading.Thread(target=lambda: got.extend(world.keys.get(["late"], 30)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [b"here"] * 4
    leave(me, world)


def nothing_old(me, turns):
    world = me.join()
    keys, seen = world.keys, 0
    if me.rank == 0:
        for turn in range(1, turns + 1):
            keys.set("data", b"%d" % turn, 20)
            keys.set("known", b"%d" % turn, 20)
    while seen < turns and me.rank > 0:
        # The ranks of a host wait for the same keys, and their waits are merged.
        known = int(keys.get(["known"], 20)[0])
        seen = int(keys.get(["data"], 20)[0])
        assert seen >= known, f"read {seen} although {known} was known to be written"
    leave(me, world)


def test_a_get_never_gives_what_was_there_before_a_write_that_its_reader_knows_of(checked_jobs):
    with checked_jobs([1, 3, 3], env=DEEP) as job:
        job.start_all(nothing_old, 500)
        job.values()


def test_one_set_answers_waiters_on_every_host(checked_jobs):
    with checked_jobs([2, 2, 2, 3], env=DEEP) as job:
        job.start_all(many_waiters)
        job.expect(*range(9))
        job.tell(0)
        job.values()


def owned_keys(me):
    world = me.join()
    world.keys.set(f"commkit:{me.rank}/x", b"of %d" % me.rank, 5)
    wanted = [f"commkit:{rank}/x" for rank in range(me.world_size)]
    assert world.keys.get(wanted, 20) == [b"of %d" % rank for rank in range(me.world_size)]
    for odd in ("commkit:", "commkit:/x", "commkit:99/x", "commkit:1", "commkit:-1/x", ""):
        assert world.keys.add(odd, 1, 20) <= me.world_size
    world.barrier(tag="odd", timeout=30)
    assert world.keys.add("commkit:99/x", 0, 20) == me.world_size
    leave(me, world)


@pytest.mark.parametrize("degree", ["1", "2"])
def test_owned_keys_are_found_from_every_host(checked_jobs, degree):
    with checked_jobs([1] * 8, env={"COMMKIT_TREE_DEGREE": degree}) as job:
        job.start_all(owned_keys)
        job.values()


ANY_KEYS = [
    bytes(range(256)),
    b"\0",
    b"a\0b",
    b"\xff\xfe",
    b"commkit:1/\0\xff",
    b"k" * 100_000,
    b"",
]


def any_bytes(me):
    world = me.join()
    for number, key in enumerate(ANY_KEYS):
        if me.rank == number % me.world_size:
            world.keys.set(key, key + b"\0%d" % number, 20)
    for number, key in enumerate(ANY_KEYS):
        assert world.keys.get([key], 20) == [key + b"\0%d" % number]
    assert sorted(world.keys.list_keys(20)) == sorted(ANY_KEYS)
    leave(me, world)


def test_keys_may_hold_any_bytes(checked_jobs):
    with checked_jobs([1, 1, 1]) as job:
        job.start_all(any_bytes)
        job.values()


SIZES = [0, 1, 65_535, 65_536, 1 << 20, 8 << 20]


def sizes(me):
    world = me.join()
    block = os.urandom(1 << 16) * 128
    if me.rank == 0:
        for size in SIZES:
            world.keys.set(f"commkit:{me.world_size - 1}/{size}", block[:size], 30)
        world.broadcast(block[: 1 << 16], timeout=30)
    else:
        block = world.broadcast(None, timeout=30) * 128
    for size in SIZES:
        assert world.keys.get([f"commkit:{me.world_size - 1}/{size}"], 30) == [block[:size]]
    leave(me, world)


def test_values_of_0_bytes_to_8_mib_arrive_unchanged(checked_jobs):
    with checked_jobs([1, 1, 1], env=DEEP) as job:
        job.start_all(sizes)
        job.values()


def early_leaver(me):
    world = me.join()
    last = me.world_size - 1
    world.keys.set(f"commkit:{me.rank}/x", b"of %d" % me.rank, 5)
    world.keys.queue_push(f"commkit:{last}/q", b"%d" % me.rank, 5)
    for number in range(20):
        world.keys.set(f"hashed-{me.rank}-{number}", b"%d" % number, 5)
    world.barrier(tag="written", timeout=30)
    if me.rank == last:
        world.leave(10)
        return
    me.meet()
    wanted = [f"commkit:{rank}/x" for rank in range(me.world_size)]
    assert world.keys.get(wanted, 20) == [b"of %d" % rank for rank in range(me.world_size)]
    for rank in range(me.world_size):
        got = world.keys.get([f"hashed-{rank}-{number}" for number in range(20)], 20)
        assert got == [b"%d" % number for number in range(20)]
    kept = [key for key in world.keys.list_keys(20) if b"/new-" not in key]
    assert len(kept) == len(set(kept)) == 21 * me.world_size
    if me.rank == 0:
        queued = [world.keys.queue_pop(f"commkit:{last}/q", True, 20) for _ in range(me.world_size)]
        assert sorted(queued) == [b"%d" % rank for rank in range(me.world_size)]
    world.keys.set(f"commkit:{last}/new-{me.rank}", b"later", 20)
    assert world.keys.get([f"commkit:{last}/new-{me.rank}"], 20) == [b"later"]
    me.meet()
    world.leave(10)


@pytest.mark.parametrize("degree", ["1", "2", "8"])
def test_keys_of_a_host_that_left_stay_readable(checked_jobs, degree):
    with checked_jobs([1] * 5, env={"COMMKIT_TREE_DEGREE": degree}) as job:
        last = job.world - 1
        job.start_all(early_leaver)
        job.values(last)
        if degree == "8":  # else it may have children, and stays for them
            until(lambda: f"host-{last}" not in job.agents().values(), 10)
        others = range(last)
        job.expect(*others)
        job.tell(*others)
        job.expect(*others)
        job.tell(*others)
        job.values()


def adds_while_owner_leaves(me):
    world = me.join()
    owner = me.world_size - 1
    if me.rank == owner:
        me.meet()
        world.leave(10)
        return 0, 0
    for turn in range(1500):
        world.keys.add(f"commkit:{owner}/count", 1, 20)
        if turn == 300:
            me.say("busy")
    me.meet()
    total = world.keys.add(f"commkit:{owner}/count", 0, 20)
    me.meet()
    world.leave(10)
    return 1500, total


@pytest.mark.parametrize("degree", ["1", "8"])
def test_no_add_is_lost_or_doubled_while_its_owner_leaves(checked_jobs, degree):
    with checked_jobs([2, 2, 1], env={"COMMKIT_TREE_DEGREE": degree}) as job:
        owner, others = job.world - 1, range(job.world - 1)
        job.start_all(adds_while_owner_leaves)
        job.expect(owner, *others)
        job.tell(owner)
        job.values(owner)
        job.expect(*others)
        job.tell(*others)
        job.expect(*others)
        job.tell(*others)
        values = job.values(*others)
    assert {total for _, total in values} == {sum(count for count, _ in values)}


def pops_while_owner_leaves(me):
    world = me.join()
    queue = "commkit:1/queue"
    if me.rank == 1:
        me.meet()
        world.leave(10)
        return None
    popped: list[bytes] = []
    thread = threading.Thread(target=lambda: popped.append(world.keys.queue_pop(queue, True, 30)))
    thread.start()
    me.meet()
    world.keys.queue_push(queue, b"first", 5)
    world.keys.queue_push(queue, b"second", 5)
    thread.join()
    popped.append(world.keys.queue_pop(queue, True, 3))
    world.leave(10)
    return popped


def test_a_blocked_pop_takes_one_element_though_the_queue_moves(checked_jobs):
    with checked_jobs([1, 1]) as job:
        job.start_all(pops_while_owner_leaves)
        job.expect(0, 1)
        job.tell(1)
        job.values(1)
        until(lambda: "host-1" not in job.agents().values(), 10)
        job.tell(0)
        assert job.values(0) == [[b"first", b"second"]]


def dies_in_a_pop(me):
    world = me.join()
    if me.rank == 1:
        world.keys.set("popping", b"", 5)
        world.keys.queue_pop("queue", True, 30)
    world.keys.wait(["popping"], 20)
    # A key of the same owner's table, asked after the pop: the pop is there by now.
    world.keys.check(["queue"], 5)
    me.meet()
    until(world.failures, 10)
    world.keys.queue_push("queue", b"kept", 5)
    kept = world.keys.queue_pop("queue", True, 3)
    world.leave(1)
    return kept


@pytest.mark.parametrize("hosts", [[2], [1, 1]])
def test_a_rank_that_died_in_a_pop_takes_no_element(checked_jobs, hosts):
    with checked_jobs(hosts) as job:
        job.start_all(dies_in_a_pop)
        job.expect(0)
        job.kill(1)
        job.tell(0)
        assert job.values(0) == [b"kept"]


def given_up_pop(me):
    world = me.join()
    assert refusal(world.keys.queue_pop, "commkit:1/queue", True, 0.2)[0] == "timeout"
    world.barrier(timeout=20)
    if me.rank == 0:
        world.keys.queue_push("commkit:1/queue", b"kept", 5)
        assert world.keys.queue_pop("commkit:1/queue", True, 3) == b"kept"
    leave(me, world)


def test_a_pop_that_timed_out_takes_no_element(checked_jobs):
    with checked_jobs([1, 1, 1]) as job:
        job.start_all(given_up_pop)
        job.values()


def eight_threads(me):
    world = me.join()
    failures: list[BaseException] = []

    def work(number):
        try:
            for turn in range(40):
                key = f"t{me.rank}-{number}-{turn}"
                world.keys.set(key, key.encode(), 20)
                assert world.keys.get([key], 20) == [key.encode()]
                world.keys.add("all", 1, 20)
                world.keys.queue_push("q", key.encode(), 20)
                world.keys.queue_pop("q", True, 20)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    world.barrier(tag="done", timeout=30)
    total, queued = world.keys.add("all", 0, 5), world.keys.queue_len("q", 5)
    leave(me, world)
    return total, queued


def test_eight_threads_of_each_rank_share_the_connection(checked_jobs):
    with checked_jobs([1, 1, 1]) as job:
        job.start_all(eight_threads)
        assert job.values() == [(8 * 40 * 3, 0)] * 3


def wait_and_host_is_lost(me):
    world = me.join()
    if me.rank == 1:
        me.meet()
        return None
    me.say()
    until(world.failures, 10)
    try:
        with overlay.native_errors():
            world.keys.set("commkit:1/lost", b"x", 2)
            world.keys.get(["commkit:1/lost"], 2)
        got = "served"
    except errors.CommkitError as error:
        got = type(error).__name__
    world.leave(1)
    return got


def test_keys_of_a_lost_host_are_answered_or_refused_but_never_hang(checked_jobs):
    with checked_jobs([1, 1, 1, 1], env=DEEP) as job:
        job.start_all(wait_and_host_is_lost)
        job.expect(*range(4))
        os.kill(job.agent_of(1), signal.SIGKILL)
        job.tell(1)
        assert set(job.values(0, 2, 3)) <= {"served", "OverlayTimeout", "OverlayError", "RankDied"}


# --- The epoch exists, and the owner of a key does not know it yet -------------------------------


def asks_host_3(me):
    world = me.join()
    if me.rank == 5:
        with pytest.raises(_C.Failure):  # its way leads past host-1; meanwhile the list has come
            world.keys.check([b"commkit:3/a"], 1)
        me.say()
        assert world.keys.get([b"commkit:3/a"], 30) == [b"x"]
    if me.rank == 3:
        world.keys.set(b"commkit:3/a", b"x", 5)
    leave(me, world)


def test_what_is_asked_of_an_agent_before_it_knows_that_the_world_has_formed_is_answered(jobs):
    """host-1 stands still between the root and host-3; host-5 reaches host-3 directly."""
    with jobs([1] * 7, env={"COMMKIT_TREE_DEGREE": "2", "COMMKIT_HEARTBEAT": "60"}) as job:
        for rank in range(6):
            job.start(rank, asks_host_3)
            until(lambda rank=rank: job.log_text().count(", parent ") == rank)
        assert "agent 3, parent 1 on host host-1" in job.log_text(3)
        time.sleep(0.3)  # all six are known at the root
        still = job.agent_of(1)
        os.kill(still, signal.SIGSTOP)
        job.start(6, asks_host_3)
        job.expect(5)
        owner = job.agent_of(3)

        def dialled():
            found = [a for a in _C.agents() if a.get("pid") == str(owner)]
            return found and int(found[0]["accepted_total"]) > 0  # it has no children

        until(dialled, 20)
        time.sleep(0.3)  # the question has been read
        os.kill(still, signal.SIGCONT)
        assert job.values() == [None] * 7
