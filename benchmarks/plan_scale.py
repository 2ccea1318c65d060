#!/usr/bin/env python3
"""Join, digest and ids of all of Megatron's groups in worlds of simulated ranks, on loopback.

Simulated ranks are connections of a few processes to real agents, eight to a host (native/join.cc):
they join, one digest of all ranks is compared over the tree, and in each group of more than one
rank the first sets an id of 128 bytes that all others wait for and get.  One id a group; what a
real rank adds (torch's objects, NCCL's communicators) is not in it.

In the same run, at 2,048 ranks: the store traffic of the same groups as torch makes them with
TORCH_DIST_INIT_BARRIER=1, by as many real clients of a real TCPStore (_store_replay.py).  Only some
of the groups are replayed (--stock-groups), evenly spread over the set, and their time is taken for
that of the others.

The floor is N clients of one hub, 128 bytes there and back (native/floor.cc).  Counters are those
of the busiest agent; the root is shown apart.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import _group_set
import join
from _bars import Bars, machine
from _native import preload, program
from join import Row
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
SIZES = (2048, 12288, 98304)
STOCK = 2048
FASTER, OVER_FLOOR, SECONDS = 200.0, 1.5, 8.0
ID = 128


def simulate(ranks: int) -> Row:
    tp, dp, pp = _group_set.shape(ranks)
    arguments = {
        "ranks": ranks,
        "workers": join.workers_for(ranks),
        "secret": join.SECRET.replace(" ", "-"),
        "timeout": 280,
        "tp": tp,
        "dp": dp,
        "pp": pp,
    }
    pairs = (f"{name}={value}" for name, value in arguments.items())
    return join.run([str(program("join")), *pairs])


def replay(ranks: int, groups: int) -> Row:
    """Seconds of torch's way; those of all groups are worked out from the ones replayed."""
    environment = {"LD_PRELOAD": str(preload("getnameinfo")), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "_store_replay.py"), str(ranks), "4", str(groups)]
    row = join.run(command, environment, timeout=1300)
    row["all_groups_seconds"] = row["groups_seconds"] / row["groups"] * row["all_groups"]
    row["seconds"] = row["construct_seconds"] + row["all_groups_seconds"]
    return row


def measure(ranks: int, repeats: int, bars: Bars) -> Row:
    rows, floors = [], []
    for _ in range(repeats):
        if ranks <= 50_000:
            floors.append(join.floor(ranks))
        rows.append(simulate(ranks))
    row = dict(join.median_row(rows, "ids_seconds"))
    row["shape"], row["repeats"] = _group_set.text(ranks), repeats
    row["groups"] = _group_set.count(ranks)
    if floors:
        row["floor_seconds"] = join.median_row(floors, "seconds")["seconds"]
    return bars.keep(kind="simulated ranks, loopback", **row)


def show(rows: list[Row], stock: Row | None, console: Console) -> None:
    console.print(
        "Simulated ranks, 8 a host, join, compare a digest, exchange the ids of Megatron's groups "
        "(loopback; seconds since the start)",
        style="italic",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for column in (
        *("ranks", "hosts", "groups", "joined", "digest", "ids", "floor", "over floor"),
        *("torch", "faster", "overflows", "MiB", "CPU s"),
    ):
        table.add_column(column, justify="right")
    for row in rows:
        base = row.get("floor_seconds")
        torch_seconds = stock["seconds"] if stock and stock["ranks"] == row["ranks"] else None
        table.add_row(
            f"{row['ranks']:,}",
            f"{row['hosts']:,}",
            f"{row['groups']:,}",
            *(f"{row[key]:.3f}" for key in ("seconds", "digest_seconds", "ids_seconds")),
            f"{base:.3f}" if base else "-",
            f"{row['ids_seconds'] / base:.2f}" if base else "-",
            f"{torch_seconds:.1f}" if torch_seconds else "-",
            f"{torch_seconds / row['ids_seconds']:.0f}x" if torch_seconds else "-",
            str(row["overflows"]),
            str(row["resident_mib"]),
            f"{row['cpu_seconds']:.1f}",
        )
    console.print(table)
    if stock:
        console.print(
            f"torch with its barrier, {stock['ranks']:,} clients of one TCPStore: constructed in "
            f"{stock['construct_seconds']:.2f} s; {stock['groups']} of {stock['all_groups']:,} "
            f"groups replayed in {stock['groups_seconds']:.2f} s, "
            + (
                f"extrapolated to {stock['all_groups_seconds']:.1f} s for all"
                if stock["groups"] < stock["all_groups"]
                else "which is all of them"
            ),
            highlight=False,
            soft_wrap=True,
        )
    console.print()
    for row in rows:
        explain(row, console)


def owned(ranks: int) -> tuple[int, int, int]:
    """(groups, hosts, ranks) of which the first host holds the ids, and who else asks for them."""
    tp, dp, pp = _group_set.shape(ranks)
    local = min(8, tp)  # tp is 8 in worlds of 64 and more: a host is a tensor-parallel group
    groups = tp + 1 + 1 + 2 * tp + 1
    remote = tp * (dp - 1) + (pp - 1) + tp * (pp - 1) + tp + (dp - 1)
    askers = tp * (dp - 1) + local * (pp - 1) + tp * (pp - 1) + tp + local * (dp - 1)
    return groups, remote, askers


def explain(row: Row, console: Console) -> None:
    """Where the bytes of the busiest agent come from."""
    groups, hosts, ranks = owned(row["ranks"])
    busiest = max(row["root"]["bytes"], row["busiest_other"]["bytes"])
    console.print(
        f"{row['ranks']:,} ranks: {row['all_bytes'] / 1e6:.1f} MB in {row['all_messages']:,} "
        f"messages in all, counted at both ends; busiest agent {busiest / 1e6:.2f} MB (root "
        f"{row['root']['bytes'] / 1e6:.2f} MB in {row['root']['messages']:,}, another "
        f"{row['busiest_other']['bytes'] / 1e6:.2f} MB in {row['busiest_other']['messages']:,}). "
        f"The host of rank 0, the root's, holds the ids of {groups} groups for {ranks:,} ranks on "
        f"other hosts; with waits merged on every host {hosts:,} answers of {ID} bytes, "
        f"{hosts * ID / 1e6:.2f} MB, and as many requests: the rest is keys, headers, what it "
        "passes on for the hosts below it, and the list of hosts that agents with children fetch.",
        highlight=False,
        soft_wrap=True,
    )


def judge(rows: list[Row], stock: Row | None, bars: Bars) -> None:
    by_ranks = {row["ranks"]: row for row in rows}
    if stock and (row := by_ranks.get(STOCK)):
        faster = stock["seconds"] / row["ids_seconds"]
        bars.check(f"faster_than_torch_with_barrier_{STOCK}", faster, ">=", FASTER)
    if row := by_ranks.get(12288):
        over = row["ids_seconds"] / row["floor_seconds"]
        bars.check("over_floor_12288", over, "<=", OVER_FLOOR)
    if row := by_ranks.get(98304):
        bars.check("seconds_98304", row["ids_seconds"], "<", SECONDS)
    for ranks, row in by_ranks.items():
        bars.check(f"overflows_{ranks}", row["overflows"], "==", 0)


def sizes_of(options: argparse.Namespace) -> list[int]:
    if options.ranks:
        return [int(part) for part in options.ranks.split(",")]
    return [64, 256] if options.quick else list(SIZES)


def main() -> int:
    bars = Bars("plan_scale", __doc__ or "")
    add = bars.parser.add_argument
    add("--ranks", help="comma-separated world sizes (default 2,048, 12,288 and 98,304)")
    add("--repeats", type=int, default=3, help="runs of each up to 50,000 ranks (default 3)")
    add("--stock-ranks", type=int, default=STOCK, help="ranks of torch's TCPStore; 0: none")
    add("--stock-groups", type=int, default=16, help="groups that are replayed there")
    options = bars.parse()
    sizes = sizes_of(options)
    if options.quick:
        options.repeats, options.stock_groups = 1, min(options.stock_groups, 4)
        options.stock_ranks = min(options.stock_ranks, sizes[0])
    console = Console(width=None if sys.stdout.isatty() else 160)
    here = machine()
    console.print(
        f"{here['architecture']}, {here['cores']} cores, load {here['load']}",
        highlight=False,
    )
    rows = [measure(ranks, options.repeats if ranks <= 50_000 else 1, bars) for ranks in sizes]
    stock = replay(options.stock_ranks, options.stock_groups) if options.stock_ranks else None
    if stock:
        bars.keep(kind="real clients of torch's TCPStore, loopback", **stock)
    show(rows, stock, console)
    judge(rows, stock, bars)
    return bars.finish()


if __name__ == "__main__":
    sys.exit(main())
