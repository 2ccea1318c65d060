#!/usr/bin/env python3
"""How fast N ranks join a world: simulated ranks, real agents and sockets, on loopback.

In the same run: the floor (N clients, one hub, 128 bytes there and back; native/floor.cc) and
torch's TCPStore with N clients.  Counters are those of the busiest agent; the root is shown apart.
All figures are of simulated ranks: 8 to a host, every host with an agent of its own, many hosts in
one process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from _bars import Bars, exponent
from _native import preload, program
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
SECRET = "a secret of the benchmark"
# Listeners, both ends of eight ranks' connections, their pidfds, links: of the first hosts to come,
# which are together in a few processes, to 32 children.
DESCRIPTORS_A_HOST = 38
DESCRIPTORS = 19_000
BAR_RANKS = (64, 2048, 12288, 98304)
Row = dict[str, Any]


def workers_for(ranks: int) -> int:
    """Two processes, one a core, or as many as it takes to hold the descriptors."""
    return max(2, math.ceil(ranks / 8 * DESCRIPTORS_A_HOST / DESCRIPTORS))


def run(command: list[str], environment: dict[str, str] | None = None, timeout: float = 300) -> Row:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        timeout=timeout,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{Path(command[0]).name} {' '.join(command[1:])}: {done.stderr.strip()}"
        )
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def join(ranks: int, options: argparse.Namespace) -> Row:
    arguments = {
        "ranks": ranks,
        "workers": workers_for(ranks),
        "secret": "" if options.no_secret else SECRET.replace(" ", "-"),
        "spread": options.spread,
        "shuffle": 0 if options.in_order else 1,
    }
    return run([str(program("join")), *(f"{name}={value}" for name, value in arguments.items())])


def floor(ranks: int) -> Row:
    return run([str(program("floor")), f"ranks={ranks}", "workers=2"])


def tcpstore(ranks: int, delay_us: int = 0) -> Row:
    environment = {"LD_PRELOAD": str(preload("getnameinfo")), "OMP_NUM_THREADS": "1"}
    if delay_us:
        environment["DELAY_US"] = str(delay_us)
    return run([sys.executable, str(HERE / "_tcpstore.py"), str(ranks), "4"], environment)


def median_row(rows: list[Row], key: str) -> Row:
    """The row of the median time: its counters and its time belong together."""
    middle = statistics.median_low(row[key] for row in rows)
    return next(row for row in rows if row[key] == middle)


def measure(ranks: int, options: argparse.Namespace, bars: Bars) -> Row:
    """Join, floor and TCPStore in turns, so that the machine's moods meet all of them."""
    joins, floors, stores = [], [], []
    repeats = 1 if ranks > 50_000 else options.repeats
    for _ in range(repeats):
        if ranks <= 50_000:
            floors.append(floor(ranks))
        joins.append(join(ranks, options))
        if ranks <= options.tcpstore_up_to:
            stores.append(tcpstore(ranks))
    row = dict(median_row(joins, "seconds"))
    row["overflows"] = max(one["overflows"] for one in joins)
    if floors:
        row["floor_seconds"] = median_row(floors, "seconds")["seconds"]
    if stores:
        row["tcpstore_construct_seconds"] = statistics.median(
            s["construct_seconds"] for s in stores
        )
        row["tcpstore_set_wait_seconds"] = statistics.median(s["set_wait_seconds"] for s in stores)
    row["secret"] = not options.no_secret
    row["arrival"] = "in order" if options.in_order else "random order"
    row["spread_seconds"] = options.spread
    return bars.keep(kind="simulated ranks, loopback", **row)


def show(rows: list[Row], console: Console) -> None:
    table = Table(title="Simulated ranks join, 8 a host (loopback)")
    for column in (
        "ranks",
        "hosts",
        "join s",
        "floor s",
        "over floor",
        "TCPStore s",
        "+ set, wait",
    ):
        table.add_column(column, justify="right")
    for column in (
        "root open",
        "root accepted",
        "other open",
        "other messages",
        "overflows",
        "MiB",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        base, store = row.get("floor_seconds"), row.get("tcpstore_construct_seconds")
        table.add_row(
            f"{row['ranks']:,}",
            f"{row['hosts']:,}",
            f"{row['seconds']:.3f}",
            f"{base:.3f}" if base else "-",
            f"{row['seconds'] / base:.2f}" if base else "-",
            f"{store:.3f}" if store else "-",
            f"{store + row['tcpstore_set_wait_seconds']:.3f}" if store else "-",
            str(row["root"]["peak_open"]),
            str(row["root"]["accepted_total"]),
            str(row["busiest_other"]["peak_open"]),
            str(row["busiest_other"]["messages"]),
            str(row["overflows"]),
            str(row["resident_mib"]),
        )
    console.print(table)


def judge(rows: list[Row], bars: Bars) -> None:
    by_ranks = {row["ranks"]: row for row in rows}
    for ranks in (2048, 12288):
        row = by_ranks[ranks]
        bars.check(f"join_over_floor_{ranks}", row["seconds"] / row["floor_seconds"], "<=", 1.0)
    row = by_ranks[2048]
    construct = row["tcpstore_construct_seconds"]
    whole = construct + row["tcpstore_set_wait_seconds"]
    bars.check("faster_than_tcpstore_construct_2048", construct / row["seconds"], ">=", 5)
    bars.check("faster_than_tcpstore_set_wait_2048", whole / row["seconds"], ">=", 8)
    bars.check("join_seconds_98304", by_ranks[98304]["seconds"], "<", 5)
    bars.check("join_mib_98304", by_ranks[98304]["resident_mib"], "<", 4096)
    for ranks, row in by_ranks.items():
        busiest = max(row["root"]["peak_open"], row["busiest_other"]["peak_open"])
        accepted = max(row["root"]["accepted_total"], row["busiest_other"]["accepted_total"])
        bars.check(f"held_{ranks}", busiest, "<=", 4 * math.sqrt(row["hosts"]) + 64)
        bars.check(f"accepted_{ranks}", accepted, "<=", row["hosts"] + 64)
        bars.check(f"overflows_{ranks}", row["overflows"], "==", 0)
    for name in ("peak_open", "messages"):
        points = [(row["hosts"], row["busiest_other"][name]) for row in rows]
        bars.check(f"exponent_of_{name}", exponent(points), "<=", 0.6)


def main() -> int:
    bars = Bars("join", __doc__ or "")
    add = bars.parser.add_argument
    add("--ranks", help="comma-separated world sizes, multiples of 8 (default: 64 to 12,288)")
    add("--repeats", type=int, default=5, help="runs of each, the median counts (default 5)")
    add("--spread", type=float, default=0.0, help="seconds over which the hosts arrive")
    add("--in-order", action="store_true", help="hosts arrive in the order of their ranks")
    add("--no-secret", action="store_true", help="without COMMKIT_SECRET's proof")
    add("--tcpstore-up-to", type=int, default=2048, help="largest world for torch's TCPStore")
    add(
        "--slow-dns", type=int, metavar="US", help="also TCPStore with look-ups that take this long"
    )
    options = bars.parse()
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.bars:
        sizes = list(BAR_RANKS)
    elif options.quick:
        sizes, options.repeats = [64, 256], 1
    else:
        sizes = [64, 256, 1024, 2048, 12288]
    if options.ranks:
        sizes = [int(part) for part in options.ranks.split(",")]
    rows = [measure(ranks, options, bars) for ranks in sizes]
    show(rows, console)
    if options.slow_dns:
        ranks = min(256, *sizes)
        slow = tcpstore(ranks, options.slow_dns)
        console.print(
            f"TCPStore, {ranks} clients, {options.slow_dns} us a reverse look-up: construction "
            f"{slow['construct_seconds']:.3f} s; commkit makes no reverse look-up"
        )
        bars.keep(kind="TCPStore with slow reverse DNS", delay_us=options.slow_dns, **slow)
    if options.bars:
        judge(rows, bars)
    return bars.finish()


if __name__ == "__main__":
    sys.exit(main())
