#!/usr/bin/env python3
"""What asking the tuner costs NCCL: a look-up in tables of 10 to 100,000 rows.

The plugin's own code, called as NCCL calls it; half of the rows apply to the communicator. No GPU
and no NCCL take part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _bars import Bars
from _native import program
from rich.console import Console
from rich.table import Table

from commkit import tuner

ROWS = (10, 1_000, 10_000, 100_000)
JUDGED, NANOSECONDS = 10_000, 200.0


def table(rows: int) -> str:
    """Stretches of sizes up to 1 T, evenly spread, for 8 nodes and for others in turns."""
    step = (1 << 40) // rows
    return tuner.text(
        [
            tuner.Row(
                "allreduce",
                (i * step, (i + 1) * step),
                "ring",
                "simple",
                nodes=(8, 9) if i % 2 else (9, None),
            )
            for i in range(rows)
        ]
    )


def measure(rows: int, calls: int) -> dict[str, float]:
    """The lowest of five runs: what disturbs a run only adds to it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "table")
        path.write_text(table(rows))
        runs = []
        for _ in range(5):
            done = subprocess.run(
                [str(program("lookup", ("net", "tuner"))), f"calls={calls}"],
                env={**os.environ, "COMMKIT_TUNER_TABLE": str(path)},
                capture_output=True,
                text=True,
                check=True,
            )
            runs.append(json.loads(done.stdout))
    return min(runs, key=lambda run: float(run["nanoseconds"]))


def main() -> int:
    bars = Bars("tuner_lookup", (__doc__ or "").strip())
    options = bars.parse()
    calls = 20_000 if options.quick else 2_000_000
    shown = Table(title="A look-up of the tuner plugin, 64 ranks on 8 nodes")
    for heading in ("rows", "ns a call", "calls that a row decided"):
        shown.add_column(heading, justify="right")
    for rows in ROWS[:2] if options.quick else ROWS:
        row = measure(rows, calls)
        bars.keep(rows=rows, **row)
        shown.add_row(f"{rows:,}", f"{row['nanoseconds']:.1f}", f"{row['chosen'] / calls:.0%}")
        if rows == JUDGED:
            bars.check("nanoseconds_10000_rows", row["nanoseconds"], "<", NANOSECONDS)
    Console(width=100).print(shown)
    return bars.finish()


if __name__ == "__main__":
    sys.exit(main())
