"""One rank's process is started anew while the others are still in the world that it died in."""

from __future__ import annotations

import signal

import pytest
from overlay_jobs import until

from commkit import errors

pytestmark = pytest.mark.timeout(90)


def meets(me, world, turn):
    """Tags and keys of every incarnation are the same words: only the epoch tells them apart."""
    values = world.all_gather(b"%d in turn %d" % (me.rank, turn), timeout=20)
    assert values == [b"%d in turn %d" % (rank, turn) for rank in range(me.world_size)]
    # Left by an earlier incarnation, it would let somebody through this barrier too early.
    assert world.keys.add("arrived", 1, 20) <= me.world_size
    world.barrier(timeout=20)
    assert world.keys.add("arrived", 0, 20) == me.world_size


def survives(me, turns):
    epochs = []
    for turn in range(turns):
        world = me.join()
        epochs.append(world.identity.epoch)
        meets(me, world, turn)
        if turn < turns - 1:
            world.leave(10)
    me.meet()
    # By now the new process of rank 2 is there, and this one is still in the old world.
    until(world.failures, 20)
    with pytest.raises(errors.RankDied, match="rank 2"):
        world.barrier(timeout=20)
    world.leave(10)
    world = me.join(40)
    meets(me, world, turns)
    world.leave(10)
    return [*epochs, world.identity.epoch]


def starts_anew(me, turn):
    """A fresh process: every counter of its own starts from nothing."""
    me.say()
    world = me.join(40)
    meets(me, world, turn)
    world.leave(10)
    return world.identity.epoch


@pytest.mark.parametrize("hosts", [[4], [2, 2], [1, 1, 1, 1]])
def test_a_restarted_process_learns_the_next_epoch_and_meets_no_old_key(jobs, hosts):
    with jobs(hosts, env={"COMMKIT_TREE_DEGREE": "1"}) as job:
        job.start_all(survives, 3)
        job.expect(0, 1, 2, 3)
        job.kill(2, signal.SIGKILL)
        job.start(2, starts_anew, 3, label="anew")
        job.expect("anew")
        job.tell(0, 1, 3)
        (newcomer,) = job.values("anew")
        survivors = job.values(0, 1, 3)
    assert survivors[0] == survivors[1] == survivors[2]
    assert len(set(survivors[0])) == 4
    assert survivors[0][-1] == newcomer
