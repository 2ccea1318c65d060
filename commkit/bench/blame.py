"""Who did not finish: what each rank was doing when a deadline passed, over the group's store.

The library under test is stuck, so the question goes another way: each rank's deadline thread
writes how far its rank has come under a key of the store that started the group, and the lowest
rank that is there reads what the others wrote.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from commkit.ranks import runs

#: Seconds that a rank waits for the others to say where they are: deadlines are set when a size
#: begins, so they differ by how far ranks drift apart.
ANSWER = 3.0
_KEY = "commkit_bench_late"


class Store(Protocol):
    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """Ordered by `step`, phases begun, and `calls`, timed calls that have returned."""

    step: int
    calls: int
    phase: str
    where: str  # file:line that the main thread is in

    def order(self) -> tuple[int, int]:
        return self.step, self.calls


def where_is(thread: int) -> str:
    """The innermost line of this repository's or a script's Python code, not of a library's."""
    frame: Any = sys._current_frames().get(thread)
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def verdict(reports: Sequence[Progress | None]) -> str:
    """What the reports of all ranks, None where there is none, say about who is to blame."""
    silent = [rank for rank, report in enumerate(reports) if report is None]
    if silent:
        return f"did not finish and does not answer: rank {runs(silent)}"
    known = [(rank, report) for rank, report in enumerate(reports) if report is not None]
    furthest = max(report.order() for _, report in known)
    behind = [(rank, report) for rank, report in known if report.order() < furthest]
    if not behind:
        return "all ranks are in the same call; none is behind"
    first = min(behind, key=lambda item: item[1].order())[1]
    ranks = runs([rank for rank, report in behind if report.order() == first.order()])
    step = "" if first.step < furthest[0] else f", call {first.calls} of a batch"
    return f"did not finish: rank {ranks} ({first.phase}{step}, at {first.where})"


class Blame:
    """`ask` is called once, by the thread that keeps the deadline."""

    def __init__(self, store: Store, rank: int, world_size: int, epoch: str) -> None:
        self._store = store
        self._rank = rank
        self._size = world_size
        self._epoch = epoch

    def _key(self, rank: int) -> str:
        return f"{_KEY}/{self._epoch}/{rank}"

    def ask(self, mine: Progress) -> str:
        """What is known of the others, on the lowest rank that answers; '' on the others."""
        answer: list[str] = []
        thread = threading.Thread(target=self._quietly, args=(mine, answer), daemon=True)
        thread.start()
        thread.join(ANSWER + 2)  # a store whose server is gone may block
        return answer[0] if answer else ""

    def _quietly(self, mine: Progress, answer: list[str]) -> None:
        # The store may have gone with a rank: this rank's own line is all that is left to say.
        with contextlib.suppress(RuntimeError):
            answer.append(self._ask(mine))

    def _ask(self, mine: Progress) -> str:
        values = [mine.step, mine.calls, mine.phase, mine.where]
        self._store.set(self._key(self._rank), json.dumps(values))
        until = time.monotonic() + ANSWER
        missing = list(range(self._size))
        while missing and time.monotonic() < until:
            missing = [rank for rank in missing if not self._store.check([self._key(rank)])]
            if missing:
                time.sleep(0.1)
        there = [rank for rank in range(self._size) if rank not in set(missing)]
        if there and there[0] != self._rank:
            # Until the speaker has read: a store that this rank serves ends with it.
            time.sleep(1.0)
            return ""
        found = [
            self._report(rank) if rank not in set(missing) else None for rank in range(self._size)
        ]
        return verdict(found)

    def _report(self, rank: int) -> Progress:
        return Progress(*json.loads(self._store.get(self._key(rank))))


AskOthers = Callable[[Progress], str]
