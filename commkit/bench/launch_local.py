"""Ranks by fork on this host: one import of torch serves them all.

A new interpreter a rank would import torch once each, seconds of a busy machine.  The parent
must not have used the GPU or any of torch's thread pools: neither survives a fork.  It starts
no group itself; it passes signals on, collects exit codes, and outlives its ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from commkit.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_THRESHOLD,
    EXIT_TIMEOUT,
    EXIT_WRONG_DATA,
    CommkitError,
    LaunchError,
)

#: Seconds for the others to end by themselves after a rank failed: they learn of it from
#: their connections and have something to say.
GRACE = 10.0
#: ... and after a rank ended well, for the leaving of the others.
LINGER = 60.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Member:
    """One local rank; the ranks meet through a file that only this user can reach."""

    rank: int
    world_size: int
    init_method: str


def _die_with(parent: int) -> None:
    """SIGKILL for this process when its parent ends, however that ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise LaunchError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent:  # it ended before prctl was in force
        os._exit(EXIT_THRESHOLD)


def one_line(error: BaseException, who: str = "") -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"commkit: {who}{': ' if who else ''}{text}\n"


def _child(member: Member, parent: int, body: Callable[[Member], int], debug: bool) -> int:
    """Everything a forked rank does; never returns to the parent's stack."""
    try:
        _die_with(parent)
        # Its own process group: a terminal's Ctrl-C then reaches it once, from the parent.
        os.setpgid(0, 0)
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        os.environ.update(
            RANK=str(member.rank),
            WORLD_SIZE=str(member.world_size),
            LOCAL_RANK=str(member.rank),
            LOCAL_WORLD_SIZE=str(member.world_size),
        )
        return body(member)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else EXIT_THRESHOLD
    except CommkitError as error:
        if debug:
            traceback.print_exc()
        sys.stderr.write(one_line(error))
        return error.exit_code
    except BaseException:
        traceback.print_exc()
        return EXIT_THRESHOLD


class _Ranks:
    """The parent's side."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}  # pid -> rank
        self.codes: dict[int, int] = {}  # rank -> exit code, or minus the signal
        self.first_failure: int | None = None
        self.received: list[int] = []

    def forward(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        self.send(number)

    def send(self, number: int) -> None:
        for pid in list(self.alive):
            # One that is not there has ended, and waitpid is about to say so.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def reap(self) -> None:
        for pid in list(self.alive):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = self.alive.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                self.codes[rank] = code
                if code and self.first_failure is None:
                    self.first_failure = rank

    def collect(self) -> None:
        """Until no rank is left; those that outstay the others are killed."""
        limit: float | None = None
        failed = killing = False
        while self.alive:
            self.reap()
            now = time.monotonic()
            if self.first_failure is not None and not failed:
                failed = True
                limit = now + GRACE
            elif self.codes and limit is None:
                limit = now + LINGER
            if limit is not None and now > limit and self.alive and not killing:
                killing = True
                ranks = ", ".join(str(rank) for rank in sorted(self.alive.values()))
                sys.stderr.write(f"commkit: killing rank {ranks}: still alive after the others\n")
                self.send(signal.SIGKILL)
            time.sleep(0.01)

    def exit_code(self) -> int:
        """The most telling code of all ranks, after a line for each that a signal ended."""
        for rank, code in sorted(self.codes.items()):
            if code < 0:
                name = signal.Signals(-code).name
                sys.stderr.write(f"commkit: rank {rank} was ended by {name}\n")
        codes = set(self.codes.values())
        for telling in (EXIT_WRONG_DATA, EXIT_INTERRUPTED, EXIT_TIMEOUT):
            if telling in codes:
                return telling
        if self.received and any(codes):
            return 128 + self.received[0]  # 130 for SIGINT
        if self.first_failure is None:
            return EXIT_OK
        first = self.codes[self.first_failure]
        return first if first > 0 else EXIT_THRESHOLD


def run(nproc: int, body: Callable[[Member], int], *, debug: bool = False) -> int:
    """Fork `nproc` ranks, run `body` in each, return the exit code that sums them up.

    A rank sees RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.  Other ranks than a failed
    one have GRACE seconds to end; no rank outlives this process.  Raises LaunchError where the
    system refuses to fork.
    """
    meeting = tempfile.mkdtemp(prefix=f"commkit-bench-{os.getpid()}-")
    parent = os.getpid()
    ranks = _Ranks()
    old = {number: signal.signal(number, ranks.forward) for number in _FORWARDED}
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(nproc):
            member = Member(rank, nproc, f"file://{meeting}/rendezvous")
            # A signal between fork and `_child` would run the parent's handler in the rank.
            signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
            with warnings.catch_warnings():
                # Python >= 3.12 warns of threads; those that libraries start on import sleep.
                warnings.simplefilter("ignore", DeprecationWarning)
                try:
                    pid = os.fork()
                except OSError as error:
                    ranks.send(signal.SIGKILL)
                    ranks.collect()
                    raise LaunchError(
                        f"--nproc {nproc}: fork of rank {rank}: {error.strerror}; "
                        "raise the limit on processes (ulimit -u) or start fewer ranks"
                    ) from error
            if pid == 0:
                code = EXIT_THRESHOLD
                try:
                    code = _child(member, parent, body, debug)
                    sys.stdout.flush()
                    sys.stderr.flush()
                finally:
                    os._exit(code)
            ranks.alive[pid] = rank
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
            if ranks.received:
                break  # interrupted while starting: the ranks there are cannot form the world
        if len(ranks.alive) < nproc:
            ranks.send(signal.SIGKILL)
        ranks.collect()
        return ranks.exit_code()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        for number, handler in old.items():
            signal.signal(number, handler)
        shutil.rmtree(meeting, ignore_errors=True)
