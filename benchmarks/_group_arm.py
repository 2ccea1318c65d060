"""start_up.py's second part: a world, all of Megatron's groups, the first collective of each."""

from __future__ import annotations

import time
from typing import Any

import _group_set
from _bars import Bars, exponent
from _worlds import A_HOST, HOW, Then, Way, in_turns
from rich.console import Console
from rich.table import Table

BARRIER = {"TORCH_DIST_INIT_BARRIER": "1"}
WAYS = {
    "stock": Way("torch as it ships: every rank calls new_group for every group"),
    "barrier": Way("the same with TORCH_DIST_INIT_BARRIER=1", BARRIER),
    "local": Way("torch, members only, use_local_synchronization=True"),
    "lazy": Way("as stock with TORCH_GLOO_LAZY_INIT=1", {"TORCH_GLOO_LAZY_INIT": "1"}),
    "commkit": Way("commkit.init_process_group and new_groups", native=True),
    "eager": Way(
        "the same with TORCH_GLOO_LAZY_INIT=0", {"TORCH_GLOO_LAZY_INIT": "0"}, native=True
    ),
    "patched": Way("stock's calls under commkit's patch", patched=True),
}
GLOO_ONLY = ("lazy", "eager")
#: Ways in which gloo connects all ranks of a group to one another.
FULL_MESH = ("stock", "barrier", "local", "eager")
BACKENDS = ("ids", "gloo")

# Bounds.
FEWER_OPERATIONS, OPERATIONS_EXPONENT = 500.0, 0.6
FASTER_THAN_BARRIER, FASTER_THAN_STOCK, FASTER_THAN_GLOO = 40.0, 1.5, 10.0
PATCHED_OVER_STOCK, PATCHED_FROM = 1.1, 32


def _then(name: str, way: Way) -> Then:
    make = _group_set.by_commkit if way.native else _group_set.by_torch(name == "local")

    def then() -> dict[str, float]:
        groups = make()
        made = time.monotonic()
        _group_set.use(groups)
        return {"made": made, "used": time.monotonic()}

    return then


def measure(
    ranks: int, backend: str, repeats: int, gloo_up_to: int, bars: Bars
) -> dict[str, dict[str, Any]]:
    """Every way in turns; way -> medians.  Gloo's full meshes up to `gloo_up_to` ranks."""
    ways = {
        name: way
        for name, way in WAYS.items()
        if (name not in GLOO_ONLY if backend != "gloo" else True)
        and not (backend == "gloo" and name in FULL_MESH and ranks > gloo_up_to)
    }
    times = dict.fromkeys(ways, repeats)
    if "barrier" in times and ranks >= 256:
        times["barrier"] = min(repeats, 3 if ranks < 1024 else 1)
    then = {name: _then(name, way) for name, way in ways.items()}
    rows = in_turns(ranks, backend, ways, then, times)
    groups = _group_set.count(ranks)
    shape = _group_set.text(ranks)
    return {
        name: bars.keep(part="groups", how=HOW, shape=shape, groups=groups, **row)
        for name, row in rows.items()
    }


def show(rows: dict[str, Any], console: Console) -> None:
    first = next(iter(rows.values()))
    ranks, backend = first["ranks"], first["backend"]
    hosts = -(-ranks // A_HOST)
    console.print(
        f"{backend}, {ranks} ranks on {hosts} simulated host{'s' * (hosts > 1)}, {first['shape']}, "
        f"{first['groups']} groups, loopback; ms",
        style="italic",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for column in (
        *("world", "lowest", "highest", "of it groups", "to torch", "at best", "groups to torch"),
        *("to barrier", "processor", "busiest", "connections", "segments", "own MiB", "of"),
    ):
        table.add_column(column, justify="right")

    def ratio(row: dict[str, Any], what: str, base: str) -> str:
        return f"{row[what] / rows[base][what]:.3f}" if base in rows else "-"

    def number(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    for name, row in rows.items():
        table.add_row(
            name,
            *(f"{1e3 * row[key]:.1f}" for key in ("seconds", "lowest", "highest", "after_init")),
            ratio(row, "seconds", "stock"),
            ratio(row, "lowest", "stock"),
            ratio(row, "after_init", "stock"),
            ratio(row, "seconds", "barrier"),
            f"{1e3 * row['processor_seconds'] / ranks:.2f}",
            f"{row['busiest']:,}",
            number(row["connections_a_rank"]),
            number(row["segments_a_rank"]),
            number(row["own_mib"]),
            str(row["repeats"]),
        )
    console.print(table)
    for name in ("commkit", "patched"):
        phases = ", ".join(f"{k} {1e3 * v:.1f}" for k, v in rows[name]["phases"].items())
        console.print(f"  {name}: median rank's {phases}", highlight=False, soft_wrap=True)
    console.print()


def judge(found: dict[tuple[str, int], dict[str, Any]], largest: int, bars: Bars) -> None:
    """`found`: (back end, ranks) -> way -> row."""
    ids = {ranks: rows for (backend, ranks), rows in found.items() if backend == "ids"}
    if rows := ids.get(largest):
        for name in ("commkit", "patched"):
            fewer = rows["barrier"]["busiest"] / rows[name]["busiest"]
            bars.check(f"fewer_operations_{name}_{largest}", fewer, ">=", FEWER_OPERATIONS)
        faster = rows["barrier"]["seconds"] / rows["commkit"]["seconds"]
        bars.check(f"faster_than_barrier_{largest}", faster, ">=", FASTER_THAN_BARRIER)
    if len(ids) > 1:
        for name in ("commkit", "patched"):
            points = [(ranks, rows[name]["busiest"]) for ranks, rows in ids.items()]
            slope = exponent(points)
            bars.check(f"exponent_of_operations_{name}", slope, "<=", OPERATIONS_EXPONENT)
    for ranks, rows in ids.items():
        if ranks >= PATCHED_FROM:
            faster = rows["stock"]["seconds"] / rows["commkit"]["seconds"]
            bars.check(f"faster_than_stock_{ranks}", faster, ">=", FASTER_THAN_STOCK)
            over = rows["patched"]["seconds"] / rows["stock"]["seconds"]
            bars.check(f"patched_over_stock_{ranks}", over, "<=", PATCHED_OVER_STOCK)
    if rows := found.get(("gloo", 64)):
        faster = rows["stock"]["seconds"] / rows["commkit"]["seconds"]
        bars.check("faster_than_eager_gloo_64", faster, ">=", FASTER_THAN_GLOO)
