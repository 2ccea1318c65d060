"""A command as a job on the hosts of a lab: ranks, their variables, their end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from commkit.errors import UsageError
from commkit.topology import netns
from commkit.topology.lab import Lab, LabHost

#: How long ranks may take to end after SIGTERM, and agents after the last rank's end.
GRACE_SECONDS = 5.0
MASTER_PORT = 29500


def hosts_named(lab: Lab, names: Sequence[str]) -> list[LabHost]:
    """Hosts by name, in this order; UsageError for one that is not there, or twice."""
    known = {host.name: host for host in lab.hosts}
    for name in names:
        if name not in known:
            raise UsageError(
                f"host {name!r}: expected hosts of the lab, {lab.hosts[0].name} to "
                f"{lab.hosts[-1].name}"
            )
    if len(set(names)) != len(names):
        raise UsageError(f"hosts {', '.join(names)}: expected every host once")
    return [known[name] for name in names]


def variables(hosts: Sequence[LabHost], ranks_per_host: int) -> Iterator[tuple[LabHost, list[str]]]:
    """(host, NAME=VALUE of env://) of every rank, ranks in the order of the hosts."""
    if ranks_per_host < 1:
        raise UsageError(f"{ranks_per_host} ranks a host: expected 1 or more")
    common = {
        "WORLD_SIZE": len(hosts) * ranks_per_host,
        "LOCAL_WORLD_SIZE": ranks_per_host,
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": MASTER_PORT,
    }
    for index, host in enumerate(hosts):
        for local in range(ranks_per_host):
            own = {"RANK": index * ranks_per_host + local, "LOCAL_RANK": local}
            yield host, [f"{name}={value}" for name, value in {**own, **common}.items()]


def start(
    lab: Lab,
    command: Sequence[str],
    hosts: Sequence[LabHost],
    ranks_per_host: int = 1,
    more: Mapping[str, str] | None = None,
    **options: Any,
) -> list[subprocess.Popen[Any]]:
    """One process a rank, in rank order; `options` are Popen's."""
    extra = [f"{name}={value}" for name, value in (more or {}).items()]
    return [
        lab.popen(host, ["env", *own, *extra, *command], **options)
        for host, own in variables(hosts, ranks_per_host)
    ]


def wait(lab: Lab, processes: Sequence[subprocess.Popen[Any]]) -> tuple[int, int]:
    """(0, -1), or the exit status of the first rank that fails (128 + N if signal N ended it) and
    that rank; the others are then told to end.  What ranks have left behind, such as agents, has
    had its time when this returns."""
    status, failed = 0, -1
    running = list(processes)
    while running and not status:
        ended = [process for process in running if process.poll() is not None]
        running = [process for process in running if process not in ended]
        for process in ended:
            if process.returncode and not status:
                status, failed = process.returncode, processes.index(process)
        time.sleep(0 if ended else 0.01)
    if running:
        netns.signal_processes(map(lab.namespace, lab.hosts), signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while lab.pids() and time.monotonic() < deadline:
        for process in running:
            process.poll()
        time.sleep(0.02)
    return 128 - status if status < 0 else status, failed


@contextlib.contextmanager
def ended_by(*numbers: int) -> Iterator[None]:
    """Signals that would end this process at once unwind it instead: the lab goes before it."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    # Not those that nohup has turned off.
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
