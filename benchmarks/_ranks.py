"""Worlds of real ranks on this machine: processes forked from one that has imported torch.

`isolated` gives the caller a network namespace of its own, where it may, so that the kernel's
counters of connections and segments are this benchmark's alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = dict[str, Any]

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
ISOLATED = "COMMKIT_BENCHMARKISOLATED"


class RankFailed(RuntimeError):
    """A rank of a forked world raised, died or stayed silent."""


def restart(preload: Path) -> None:
    """Once: starts this program anew in a network namespace of its own, with `preload`.

    Without the right to make namespaces it stays in this one.
    """
    if ISOLATED in os.environ:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    alone = libc.unshare(_CLONE_NEWNET) == 0
    if alone:
        with socket.socket() as any_socket:
            request = bytearray(struct.pack("16sh22x", b"lo", 0))
            fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
            flags = struct.unpack_from("h", request, 16)[0] | _IFF_UP
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags))
    os.environ.update({ISOLATED: str(int(alone)), "OMP_NUM_THREADS": "1"})
    os.environ["LD_PRELOAD"] = str(preload)
    os.execv(sys.executable, [sys.executable, *sys.argv])


def isolated() -> bool:
    return os.environ.get(ISOLATED) == "1"


def tcp_counters() -> dict[str, int]:
    """This network namespace's TCP counters since it was made (RFC 4022's names)."""
    lines = Path("/proc/net/snmp").read_text().splitlines()
    names, values = (line.split()[1:] for line in lines if line.startswith("Tcp:"))
    return {name: int(value) for name, value in zip(names, values, strict=True)}


def agents_here() -> set[str]:
    """Names of the sockets of commkit's agents in this network namespace."""
    text = Path("/proc/net/unix").read_text()
    return {word for word in text.split() if word.startswith("@commkit-")}


def raise_file_limit() -> int:
    """The number of descriptors that each process may have from now on."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def free_port(draw: int) -> int:
    """A free port of loopback below the ephemeral range, where no connection takes it meanwhile."""
    for step in range(20000):
        port = 10000 + (draw * 37 + step) % 20000
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RankFailed("no port from 10000 to 29999 is free on 127.0.0.1")


def _wait_for_word(pipe: int) -> None:
    if os.read(pipe, 1) != b"x":
        os._exit(3)


def _child(
    rank: int,
    environment: dict[str, str],
    ready: Callable[[], Callable[[], Report]],
    finish: Callable[[], None],
    pipes: dict[str, tuple[int, int]],
) -> None:
    def say(report: Report) -> None:
        # Less than PIPE_BUF: a write of all ranks to one pipe is not torn.
        os.write(pipes["out"][1], json.dumps({"rank": rank, **report}).encode() + b"\n")

    try:
        os.environ.update(environment)
        start = ready()
        say({"ready": True})
        _wait_for_word(pipes["go"][0])
        say(start())
        _wait_for_word(pipes["end"][0])
        finish()
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        say({"error": text[:400]})
        os._exit(1)
    os._exit(0)


def world(
    environments: list[dict[str, str]],
    ready: Callable[[], Callable[[], Report]],
    finish: Callable[[], None],
    timeout: float,
    meanwhile: Callable[[], None] | None = None,
) -> list[Report]:
    """Forks a rank for each environment; what their starts report, in rank order.

    Each rank calls ready() and waits until all have; then all at once call what it returned, wait
    until all have reported, call finish() and end.  `meanwhile` is called here before they do.
    Raises RankFailed.
    """
    pipes = {name: os.pipe() for name in ("go", "end", "out")}
    pids: list[int] = []
    gc.collect()
    gc.freeze()  # else the first collection of each child copies the whole heap
    try:
        for rank, environment in enumerate(environments):
            pid = os.fork()
            if pid == 0:
                for name in ("go", "end"):
                    os.close(pipes[name][1])
                _child(rank, environment, ready, finish, pipes)
            pids.append(pid)
        deadline = time.monotonic() + timeout
        buffer = bytearray()
        _collect(pipes["out"][0], buffer, len(pids), deadline)
        os.write(pipes["go"][1], b"x" * len(pids))
        reports = _collect(pipes["out"][0], buffer, len(pids), deadline)
        if meanwhile is not None:
            meanwhile()
        os.write(pipes["end"][1], b"x" * len(pids))
        _reap(pids, deadline)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pair in pipes.values():
            for fd in pair:
                os.close(fd)
        gc.unfreeze()
    return reports


def _collect(fd: int, buffer: bytearray, count: int, deadline: float) -> list[Report]:
    found: dict[int, Report] = {}
    while len(found) < count:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            silent = [rank for rank in range(count) if rank not in found]
            raise RankFailed(
                f"{len(silent)} of {count} ranks were silent, the first is {silent[0]}"
            )
        buffer += os.read(fd, 1 << 16)
        *lines, rest = bytes(buffer).split(b"\n")
        buffer[:] = rest
        for line in lines:
            report = json.loads(line)
            if "error" in report:
                raise RankFailed(f"rank {report['rank']}: {report['error']}")
            found[report["rank"]] = report
    return [found[rank] for rank in range(count)]


def _reap(pids: list[int], deadline: float) -> None:
    """Waits for the ranks' ends; those that ended well are taken out of `pids`."""
    while pids and time.monotonic() < deadline:
        pid, status = os.waitpid(pids[0], os.WNOHANG)
        if pid == 0:
            time.sleep(0.001)
            continue
        pids.pop(0)
        if status != 0:
            raise RankFailed(f"process {pid} ended with status {status}")
    if pids:
        raise RankFailed(f"{len(pids)} ranks did not end")
