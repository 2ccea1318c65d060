"""Sweeps of collectives over message sizes, with nccl-tests' flags and columns.

module         subject
arguments      flags -> a checked plan of sizes, types and reductions (no torch)
dryrun         what a plan would do, need and take (no torch)
table          nccl-tests' text format (no torch)
tournament     who meets whom in rounds of disjoint pairs (no torch)
outliers       which pairs, and whose, are unlike the others (no torch)
progress       a bar on a terminal
watch          deadlines, interrupts, and what a rank was doing when they came
blame          who did not finish
placement      which world this process belongs to; refuses a world that fell apart
launch_local   --nproc: ranks by fork on this host
agreement      what ranks tell one another first
teams          the groups that are measured
worlds         a world for each back end
recording      results -> records
formats        results of this and other tools as records; tables, CSV (no torch)
compare        two sets of results, row by row (no torch)
bootstrap      how sure a ratio of medians is (no torch)
baseline       a run beside an earlier one (no torch)
plots          charts of results: HTML, PNG (no torch)
sweep          size by size
session        one rank: join, sweep, report, leave
pairs          the matrix of pairs
init           how long starting takes
preflight      which host cannot reach which
library        a sweep inside a running job: run()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commkit.bench.library import run as run


def __getattr__(name: str) -> Any:
    # `commkit.bench` is imported where torch is not wanted yet.
    if name != "run":
        raise AttributeError(f"module 'commkit.bench' has no attribute {name!r}")
    from commkit.bench.library import run

    return run
