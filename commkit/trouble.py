"""Why a process group was not created, in commkit's terms.

torch's errors name neither ranks nor hosts; the agents know who died, and the ranks' journals who
never came.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from commkit.errors import CommkitError, JoinError, JoinTimeout, OverlayTimeout, RankDied
from commkit.overlay import World

#: A reset connection reaches a rank before the agents' report of who died; it may take this long.
REPORT_DELAY = 2.0

#: Seconds that a back end gets to notice by itself that a peer is gone or a deadline has passed.
AFTERMATH = 5.0


def explain(
    world: World,
    error: BaseException,
    what: str,
    deadline: float,
    missing: Callable[[], str] = str,
) -> CommkitError | None:
    """The error to raise from `error`, or None if that one speaks for itself.

    `what` names the group; `deadline` is on the monotonic clock; `missing` is asked only if nobody
    is reported dead.
    """
    if not isinstance(error, RuntimeError):
        return None
    if isinstance(error, CommkitError) and not isinstance(error, RankDied | OverlayTimeout):
        return None
    report = world.failures()
    # Errors of gloo begin with a place in its source; torch's own about peers are DistErrors.
    of_peers = isinstance(error, dist.DistError) or str(error).startswith("[")
    patience = time.monotonic() + (REPORT_DELAY if of_peers else 0.0)
    while not report and time.monotonic() < patience:
        time.sleep(0.05)
        report = world.failures()
    what = f"rank {world.identity.rank}: {what} was not created"
    if report:
        return RankDied(f"{what}: {'; '.join(report)}")
    who = "commkit" if isinstance(error, CommkitError) else "torch"
    reason = f"{missing() or 'no rank is reported dead'}; {who} says: {first_line(error)}"
    if isinstance(error, OverlayTimeout) or math.floor(deadline - time.monotonic()) <= 0:
        return JoinTimeout(f"{what} before the deadline; {reason}")
    return JoinError(f"{what}; {reason}")


@dataclass(frozen=True, slots=True)
class Task:
    """work() may wait for other ranks where nothing of torch's ends it: NCCL does, for the dead.

    It has `seconds` from its start; `what` is what errors call it, and `missing` says who has not
    come to it, "" if all have.
    """

    work: Callable[[], Any]
    seconds: float
    what: str
    missing: Callable[[], str] = str


def attend(world: World, tasks: Sequence[Task], threads: int = 1) -> list[Any]:
    """What the tasks return, in their order.  Works on them in that order, `threads` at once.

    Raises the first error of any of them, once the others have ended or AFTERMATH seconds later;
    RankDied that long after a death, JoinTimeout that long after a task's end, if the back end has
    not come back: its thread is then left behind.
    """
    return _Attended(world, tasks).results(threads)


class _Attended:
    def __init__(self, world: World, tasks: Sequence[Task]) -> None:
        self._world, self._tasks = world, tasks
        self._changed = threading.Condition()
        self._next = 0
        self._done: dict[int, Any] = {}
        self._running: dict[int, float] = {}  # task -> when it has to be done
        self._errors: list[BaseException] = []

    def results(self, threads: int) -> list[Any]:
        for index in range(threads):
            name = f"commkit-attended-{index}"
            threading.Thread(target=self._run, name=name, daemon=True).start()
        give_up = math.inf
        with self._changed:
            while len(self._done) < len(self._tasks):
                now = time.monotonic()
                lost = self._world.failures()
                if self._errors or lost:
                    give_up = min(give_up, now + AFTERMATH)
                if self._errors and (not self._running or now >= give_up):
                    raise self._errors[0]
                late = [index for index, end in self._running.items() if now >= end]
                if late or now >= give_up:
                    raise self._stuck(late or list(self._running), lost)
                self._changed.wait(0.2)
        return [self._done[index] for index in range(len(self._tasks))]

    def _stuck(self, late: list[int], lost: list[str]) -> CommkitError:
        shown = ", ".join(self._tasks[index].what for index in late[:4])
        what = f"rank {self._world.identity.rank}: {shown}: the back end has not come back"
        if lost:
            return RankDied(f"{what}: {'; '.join(lost)}")
        missing = self._tasks[late[0]].missing() if late else ""
        return JoinTimeout(f"{what} by the deadline; {missing or 'no rank is reported dead'}")

    def _run(self) -> None:
        while True:
            with self._changed:
                index = self._next
                if index == len(self._tasks) or self._errors:
                    return
                self._next += 1
                self._running[index] = time.monotonic() + self._tasks[index].seconds + AFTERMATH
            try:
                result = self._tasks[index].work()
            except BaseException as error:
                with self._changed:
                    self._errors.append(error)
            else:
                with self._changed:
                    self._done[index] = result
            with self._changed:
                del self._running[index]
                self._changed.notify_all()


def first_line(error: BaseException) -> str:
    """Without the source locations that torch's C++ puts before its text."""
    first = next(iter(str(error).splitlines()), "")
    return re.sub(r"^(\[\S+:\d+\]\s*)+", "", first) or type(error).__name__
