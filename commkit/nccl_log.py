"""NCCL's own account of how long the parts of a communicator's creation took.

With NCCL_DEBUG=INFO (of the subsystems INIT or, since 2.26, PROFILE) NCCL writes a line for each
communicator that this process has made:

    host:1:267 [0] NCCL INFO Init timings - ncclCommInitRankConfig: rank 3 nranks 4 total 1.16
    (kernels 0.18, alloc 0.04, bootstrap 0.93, allgathers 0.00, topo 0.00, ..., rest 0.00)

in one line.  NCCL 2.19 to 2.22 do so without the function's name and without `alloc`.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(
    r"(?P<host>[^\s:]+):(?P<pid>\d+):(?P<tid>\d+) \[\d+\] NCCL INFO Init timings"
    r"(?: - (?P<function>\w+))?: rank (?P<rank>\d+) nranks (?P<size>\d+) "
    r"total (?P<total>\d+\.\d+) \((?P<parts>[a-z]+ \d+\.\d+(?:, [a-z]+ \d+\.\d+)*)\)$"
)

#: A log that has grown beyond this is no longer read: start-up is at its beginning anyway.
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class InitTiming:
    """One communicator, as one rank made it.  Seconds, to the hundredth."""

    pid: int
    rank: int  # in the communicator
    size: int
    function: str  # "" where NCCL does not say
    total: float
    parts: Mapping[str, float]  # kernels, alloc, bootstrap, allgathers, topo, graphs, ...


def parse(text: str) -> list[InitTiming]:
    """All whole lines of that kind in a log, in its order.

    Ranks that write to one file tear one another's lines: a torn line is left out.
    """
    found = []
    for line in text.splitlines():
        match = _LINE.search(line.rstrip())
        if match is None or line.count("NCCL INFO") > 1:
            continue
        pairs = (part.split() for part in match["parts"].split(", "))
        found.append(
            InitTiming(
                int(match["pid"]),
                int(match["rank"]),
                int(match["size"]),
                match["function"] or "",
                float(match["total"]),
                {name: float(seconds) for name, seconds in pairs},
            )
        )
    return found


def of_this_process(environ: Mapping[str, str] | None = None) -> list[InitTiming]:
    """What NCCL has written in this process so far to NCCL_DEBUG_FILE; [] without such a file.

    Without that variable NCCL writes to standard output, which nobody can read back.
    """
    path = (os.environ if environ is None else environ).get("NCCL_DEBUG_FILE", "")
    if not path:
        return []
    file = Path(_expanded(path))
    try:
        with file.open(errors="replace") as log:
            text = log.read(_MOST_BYTES)
    except OSError:
        return []
    return [timing for timing in parse(text) if timing.pid == os.getpid()]


def _expanded(path: str) -> str:
    # As NCCL does: %h is the host's name up to its first dot, %p the process.
    names = {"h": socket.gethostname().partition(".")[0], "p": str(os.getpid()), "%": "%"}
    return re.sub(r"%([hp%])", lambda match: names[match[1]], path)


def by_family(
    timings: Sequence[InitTiming], groups: Sequence[tuple[str, int, int]]
) -> dict[str, InitTiming]:
    """Which communicator is which family's; `groups` are (family, rank in the group, its size).

    NCCL names neither.  What it says fits a group if rank and size do: a group that no other one
    can be mistaken for gets its timing, the others get none.
    """
    result: dict[str, InitTiming] = {}
    for family, rank, size in groups:
        alike = [group for group in groups if group[1:] == (rank, size)]
        fitting = [timing for timing in timings if (timing.rank, timing.size) == (rank, size)]
        if len(alike) == len(fitting) == 1:
            result[family] = fitting[0]
    return result
