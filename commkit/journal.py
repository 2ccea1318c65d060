"""What this rank has begun to create, where other ranks can read it when they wait in vain.

A note is one key of this rank's own, kept by its host's agent and written without waiting.  It is
read only when a creation has failed, by the ranks that were left alone.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commkit import _C
from commkit.overlay import World
from commkit.ranks import runs

#: Creations that a rank's note keeps, the newest ones.
KEPT = 64

#: Seconds, and ranks, that are spent on finding out who is missing.
_PATIENCE = 3.0
_MOST_ASKED = 256

#: Of this rank's groups that are looked at when it fails.
_MOST_UNMET = 8

#: Groups of another rank that a message quotes.
_QUOTED = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """One group: `name` is equal on all members, `label` is what people call it ("tp", or "")."""

    name: str
    label: str
    ranks: tuple[int, ...]

    def shown(self) -> str:
        called = f"{self.label!r} " if self.label else ""
        ranks = runs(self.ranks)
        return f"{called}[{ranks if len(ranks) <= 60 else ranks[:57] + '...'}]"


class Journal:
    """Notes of one rank in one world.  May be used by several threads."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lock = threading.Lock()
        self._last: deque[Entry] = deque(maxlen=KEPT)
        self._count = 0

    def begin(self, entries: Sequence[Entry]) -> None:
        """Says that this rank begins to create these groups."""
        with self._lock:
            self._last.extend(entries)
            self._count += len(entries)
            note = {
                "count": self._count,
                "last": [[entry.name, entry.shown()] for entry in self._last],
            }
            # Inside the lock: notes of two threads must not overtake one another.
            self._world.note(_key(self._world.identity.rank), json.dumps(note).encode())

    def missing(self, group: Entry) -> str:
        """Who of `group` has not begun to create it, and what those did instead; "" if all have.

        Asks the other ranks' agents, for a few seconds at most.
        """
        deadline = time.monotonic() + _PATIENCE
        others = [rank for rank in group.ranks if rank != self._world.identity.rank]
        absent: list[int] = []
        instead: dict[str, list[int]] = {}
        asked = 0
        for rank in others[:_MOST_ASKED]:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                note = self._note_of(rank, left)
            except _C.Failure:
                break  # the agent, or the world, is gone: somebody else tells that
            asked += 1
            if any(name == group.name for name, _ in note["last"]):
                continue
            if note["count"] > len(note["last"]):
                continue  # long ago, perhaps
            absent.append(rank)
            quoted = [_told(name, shown, group) for name, shown in note["last"][-_QUOTED:]]
            more = note["count"] - len(quoted)
            text = ", ".join(quoted) + (f" and {more} before" if quoted and more else "")
            instead.setdefault(text or "no group", []).append(rank)
        if not absent:
            return ""
        unasked = len(others) - asked
        return (
            f"{_ranks(absent)} did not come ("
            + "; ".join(f"{_ranks(ranks)} created {what}" for what, ranks in instead.items())
            + ")"
            + (f"; {unasked} other ranks were not asked" if unasked else "")
        )

    def unmet(self) -> list[str]:
        """`group [0,1]: rank 1 did not come (...)` for the newest groups, where members lack."""
        deadline = time.monotonic() + _PATIENCE
        with self._lock:
            newest = list(self._last)[::-1]
        found = []
        for group in newest[:_MOST_UNMET]:
            if time.monotonic() < deadline and (text := self.missing(group)):
                found.append(f"group {group.shown()}: {text}")
        return found

    def _note_of(self, rank: int, timeout: float) -> dict[str, Any]:
        key, keys = _key(rank), self._world.keys
        if not keys.check([key], timeout):
            return {"count": 0, "last": []}
        return json.loads(keys.get([key], timeout)[0])  # type: ignore[no-any-return]


def _told(name: str, shown: str, group: Entry) -> str:
    """What an error about `group` calls another rank's group; how it differs if both look alike."""
    if shown != group.shown():
        return shown
    (theirs, count), (ours, here) = name.rsplit(":", 1), group.name.rsplit(":", 1)
    if theirs == ours and count.isdigit() and here.isdigit():
        return f"{shown} number {int(count) + 1}, where this is number {int(here) + 1}"
    return f"{shown} as {name}, where this is {group.name}"


def _key(rank: int) -> bytes:
    return f"commkit:{rank}/journal".encode()


def _ranks(ranks: Sequence[int]) -> str:
    text = runs(ranks)
    if len(text) > 80:
        text = text[:77] + "..."
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
