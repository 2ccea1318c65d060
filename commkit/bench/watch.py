"""Deadlines and interrupts of one rank, and what it was doing when they came.

A rank that waits for a peer sits in native code, where no Python signal handler runs and no
exception arrives.  A thread therefore keeps the time: it says which phase did not end and ends
the process.  Records and table rows are on disk or in the pipe by then.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from commkit.bench.blame import AskOthers, Progress, where_is
from commkit.errors import EXIT_INTERRUPTED, EXIT_TIMEOUT

#: Seconds between an interrupt and a forced exit: the ranks agree on where to stop, and the
#: size under way may not end.
GRACE = 5.0


class Watch:
    """Use as a context manager, in the main thread.

    `phase` starts a phase, `allow` sets the deadline that it and later ones share.
    """

    def __init__(self, who: str) -> None:
        self.who = who
        self.interrupted = False
        #: While true an interrupt only sets `interrupted`: all ranks stop after the same size.
        self.deferring = False
        #: Who else is late: set once there is a store to ask over.
        self.ask_others: AskOthers | None = None
        #: How many timed calls of this phase have returned.
        self.calls: Callable[[], int] = lambda: 0
        self._phase = "start-up"
        self._step = 0
        self._thread = threading.get_ident()
        self._limit = 0.0
        self._deadline: float | None = None
        self._wake = threading.Condition()
        self._done = False
        self._count = 0
        self._writer: socket.socket | None = None
        self._old_handler: object = None
        self._old_fd = -1

    def __enter__(self) -> Watch:
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handler = signal.signal(signal.SIGINT, self._on_interrupt)
        threading.Thread(target=self._keep_time, name="commkit-deadline", daemon=True).start()
        threading.Thread(
            target=self._hear_signals, args=(reader,), name="commkit-signals", daemon=True
        ).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._wake:
            self._done = True
            self._wake.notify_all()
        signal.signal(signal.SIGINT, self._old_handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._old_fd)
        if self._writer is not None:
            self._writer.close()  # the thread's recv returns nothing, and it ends

    def allow(self, seconds: float) -> None:
        """The current and the following phases have this long together."""
        with self._wake:
            self._limit = seconds
            self._deadline = time.monotonic() + seconds
            self._wake.notify_all()

    def phase(self, name: str) -> None:
        self._phase = name
        self._step += 1

    def describe(self) -> str:
        return f"{self.who}: {self._phase}"

    def late(self) -> bool:
        """Most of the time allowed is gone: a lost peer has probably met its own deadline."""
        deadline = self._deadline
        return deadline is not None and deadline - time.monotonic() < 0.1 * self._limit

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        if not self.deferring:
            raise KeyboardInterrupt

    def _hear_signals(self, reader: socket.socket) -> None:
        # The byte is written by the C handler at once, even while the main thread is in a wait.
        with reader:
            while data := reader.recv(16):
                for _ in range(data.count(signal.SIGINT)):
                    self._count += 1
                    if self._count == 1:
                        threading.Thread(target=self._lose_patience, daemon=True).start()
                    else:
                        self._leave("interrupted twice", EXIT_INTERRUPTED)

    def _lose_patience(self) -> None:
        time.sleep(GRACE)
        if not self._done:
            text = f"interrupted; the other ranks did not finish this size within {GRACE:g} s"
            self._leave(text, EXIT_INTERRUPTED)

    def _keep_time(self) -> None:
        with self._wake:
            while not self._done:
                if self._deadline is None:
                    self._wake.wait()
                    continue
                left = self._deadline - time.monotonic()
                if left <= 0:
                    break
                self._wake.wait(left)
            else:
                return
        others = ""
        if self.ask_others is not None:
            here = Progress(self._step, self.calls(), self._phase, where_is(self._thread))
            others = self.ask_others(here)
        self._leave(
            f"no end within {self._limit:g} s; "
            + (f"{others}; " if others else "")
            + "a rank is stuck or unreachable: commkit bench preflight finds hosts that cannot "
            "reach each other, or give a longer --timeout",
            EXIT_TIMEOUT,
        )

    def _leave(self, text: str, code: int) -> None:
        # One write, so that the lines of many ranks do not mix; os._exit, because the main
        # thread cannot be unwound.
        line = f"commkit: {self.describe()}: {text}\n".encode()
        try:
            os.write(sys.stderr.fileno(), line)
        finally:
            os._exit(code)
