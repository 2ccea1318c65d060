"""Tells the log which members of a group have not come, long before anything times out.

A group that connects only when it is first used exists on a rank as soon as that rank has made it;
what its first operation waits for is then not visible.  The agents know which members have made
it: some time after a group was made this asks them, in a thread of its own that otherwise sleeps.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time

from commkit import _C
from commkit.errors import CommkitError, OverlayTimeout
from commkit.journal import Entry, Journal
from commkit.overlay import World

log = logging.getLogger("commkit")

#: Seconds until a group's members are first asked for; then twice as long each time.
PATIENCE = 30.0

#: Seconds that one question to the agents may take.
_ANSWER = 5.0


class Stragglers:
    """One rank's groups that are not known to be complete."""

    def __init__(self, world: World, journal: Journal) -> None:
        self._world, self._journal = world, journal
        self._changed = threading.Condition()
        self._due: list[tuple[float, float, int, Entry]] = []  # when, patience, tie-breaker
        self._count = 0
        self._thread: threading.Thread | None = None
        self._stopped = False

    def expect(self, group: Entry) -> None:
        """This rank has made its part of `group`."""
        with self._changed:
            if self._stopped:
                return
            self._count += 1
            heapq.heappush(self._due, (time.monotonic() + PATIENCE, PATIENCE, self._count, group))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="commkit-stragglers", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """Asks no more; returns at once."""
        with self._changed:
            self._stopped = True
            self._due.clear()
            self._changed.notify_all()

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._stopped:
                    left = self._due[0][0] - time.monotonic() if self._due else None
                    if left is not None and left <= 0:
                        break
                    self._changed.wait(left)
                if self._stopped:
                    return
                _, patience, count, group = heapq.heappop(self._due)
            text: str | None
            try:
                text = "" if self._is_complete(group) else self._journal.missing(group)
            except OverlayTimeout:
                text = None  # busy agents: later
            except (CommkitError, _C.Failure):
                self.stop()  # the world is gone, which others tell
                return
            if text:
                log.warning(
                    "rank %d: group %s is not complete: %s",
                    self._world.identity.rank,
                    group.shown(),
                    text,
                )
            if text != "":
                with self._changed:
                    patience *= 2
                    heapq.heappush(self._due, (time.monotonic() + patience, patience, count, group))

    def _is_complete(self, group: Entry) -> bool:
        # The agents keep no key for a group of the whole world; the journals tell.
        if len(group.ranks) == self._world.identity.world_size:
            return False
        return self._world.complete(group.name, group.ranks, _ANSWER)
