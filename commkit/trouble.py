"""Why a process group was not created, in commkit's terms.

torch's errors name neither ranks nor hosts; the agents know who died, and the ranks' journals who
never came.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
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


def attend(world: World, work: Callable[[], Any], deadline: float, what: str) -> Any:
    """work(), in a thread of its own, with an eye on the others: NCCL waits for ever for the dead.

    Raises what it raises; RankDied some seconds after a death, JoinTimeout some seconds after the
    `deadline` (on the monotonic clock), if it has not come back: the thread is then left behind.
    """
    outcome: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="commkit-attended", daemon=True)
    thread.start()
    died = math.inf
    while thread.is_alive():
        thread.join(0.02 if died == math.inf else 0.2)
        now = time.monotonic()
        failures = world.failures()
        died = min(died, now) if failures else died
        if thread.is_alive() and now >= min(died, deadline) + AFTERMATH:
            text = f"rank {world.identity.rank}: {what}: the back end has not come back"
            if failures:
                raise RankDied(f"{text}; {'; '.join(failures)}")
            raise JoinTimeout(f"{text} by the deadline; no rank is reported dead")
    if errors:
        raise errors[0]
    return outcome[0]


def first_line(error: BaseException) -> str:
    """Without the source locations that torch's C++ puts before its text."""
    first = next(iter(str(error).splitlines()), "")
    return re.sub(r"^(\[\S+:\d+\]\s*)+", "", first) or type(error).__name__
