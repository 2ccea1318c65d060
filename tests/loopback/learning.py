"""When and how ranks learn of a death: the body of such ranks, and what is asked of their records.

All processes of a machine share CLOCK_MONOTONIC: the time that a rank wrote down when it learned of
a death is compared with the time of the kill.
"""

from __future__ import annotations

import dataclasses
import time

from commkit import errors

#: What is promised, and what a machine with two busy cores may add to it.
KNOWN_SECONDS, SLACK_SECONDS = 2.0, 1.5


@dataclasses.dataclass
class Learned:
    where: str  # "join": the error of the join; "world": reported after it; "": nothing was
    kind: str
    text: str
    at: float


def learns(me, timeout=40.0, leave=1.0):
    """Joins, says so, and waits until a loss is reported or the test has something to say."""
    try:
        world = me.join(timeout)
    except errors.CommkitError as error:
        return Learned("join", type(error).__name__, str(error), time.monotonic())
    me.say("joined")
    while not (failures := world.failures()):
        if me._pipe.poll(0.01):
            me.hear()
            world.leave(leave)
            return Learned("", "", "", time.monotonic())
    learned = Learned("world", "", "; ".join(failures), time.monotonic())
    world.leave(leave)
    return learned


def check(learned, killed, *words, within=KNOWN_SECONDS + SLACK_SECONDS):
    """Each of these learned in time, in one line that has one of the words."""
    for rank, one in learned.items():
        assert one.where, f"rank {rank} was told nothing"
        assert "\n" not in one.text
        assert any(word in one.text for word in words), (rank, one, words)
        assert one.at - killed < within, f"rank {rank}: after {one.at - killed:.1f} s: {one}"


def learned_by(job, *ranks):
    return dict(zip(ranks, job.values(*ranks), strict=True))
