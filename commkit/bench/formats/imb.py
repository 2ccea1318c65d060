"""Intel MPI Benchmarks, IMB-MPI1: collectives, Sendrecv, PingPong.

For Allgather, Alltoall, Gather and Scatter #bytes is one rank's part; here it is the whole.
Its t_max is the slowest rank's mean, which is the time of a record.
"""

from __future__ import annotations

import re

from commkit.bench.formats.lines import streams
from commkit.bench.formats.reading import Given, Reading, Spread, identifier, record
from commkit.bench.formats.reading import number as number_of

_BENCHMARK = re.compile(r"# Benchmarking\s+(\S+)")
_PROCESSES = re.compile(r"# #processes = (\d+)")
_VERSION = re.compile(r"Intel ?\(R\) MPI Benchmark(?:s|\s+Suite)\s+V?([\d.]+)")
#: -> (collective, #bytes is one rank's part)
_BENCHMARKS = {
    "allreduce": ("all_reduce", False),
    "reduce": ("reduce", False),
    "reduce_scatter": ("reduce_scatter", False),
    "reduce_scatter_block": ("reduce_scatter", False),
    "bcast": ("broadcast", False),
    "allgather": ("all_gather", True),
    "allgatherv": ("all_gather", True),
    "alltoall": ("all_to_all", True),
    "alltoallv": ("all_to_all", True),
    "gather": ("gather", True),
    "gatherv": ("gather", True),
    "scatter": ("scatter", True),
    "scatterv": ("scatter", True),
    "sendrecv": ("sendrecv", False),
    "pingpong": ("ping_pong", False),
    "barrier": ("barrier", False),
}
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")


def looks_like(text: str) -> bool:
    return _BENCHMARK.search(text) is not None and "#repetitions" in text


def read(text: str, given: Given) -> Reading:
    reading = Reading("IMB", [])
    version = _VERSION.search(text)
    number = -1
    for stream in streams(text):
        name, ranks, columns = "", 0, list[str]()
        for line_number, line in stream:
            if match := _BENCHMARK.search(line):
                name, ranks, columns, number = match[1], 0, [], number + 1
                if name.lower() not in _BENCHMARKS:
                    reading.notes.append(f"line {line_number}: IMB's {name} is not read")
            elif match := _PROCESSES.search(line):
                ranks = int(match[1])
            elif "#repetitions" in line:
                columns = line.split()
            elif columns and name.lower() in _BENCHMARKS and re.match(r"\s*\d", line):
                words = line.split()
                try:
                    values = dict(zip(columns, map(number_of, words), strict=True))
                    times = values.get("t_max[usec]", values.get("t[usec]"))
                    if times is None:
                        raise ValueError
                except ValueError:
                    reading.notes.append(
                        f"line {line_number}: left out: expected {len(columns)} columns with a "
                        f"time, got {line.strip()!r}"
                    )
                    continue
                collective, each = _BENCHMARKS[name.lower()]
                size = int(values.get("#bytes", 0))
                pair = collective == "ping_pong"
                reading.records.append(
                    record(
                        tool="imb",
                        collective=collective,
                        dtype="float" if collective in _REDUCING else "int8",
                        redop="sum" if collective in _REDUCING else "none",
                        size=size * (ranks if each else 1),
                        count=size // 4 if collective in _REDUCING else size,
                        time_us=times,
                        time_is="mean" if pair else "slowest-mean",
                        ranks=ranks,
                        backend="mpi",
                        device="cpu",
                        iterations=int(values["#repetitions"]),
                        clock="monotonic",
                        spread=Spread(mean=values.get("t_avg[usec]", values.get("t[usec]"))),
                        slowest=values.get("t_max[usec]"),
                        versions={"imb": version[1]} if version else {},
                        run=identifier(text, max(number, 0)),
                        timestamp=given.changed,
                        source=0 if pair else -1,
                        peer=1 if pair else -1,
                    )
                )
    if not reading.records:
        reading.notes.append("no rows")
    return reading
