#!/usr/bin/env python3
"""Start-up beside stock torch: real ranks on one machine, forked after the imports.

Two parts: `init`, init_process_group alone; and `groups`, init_process_group, then all the process
groups that Megatron-LM makes (_group_set.py), then the first collective of each.

Ranks are grouped into simulated hosts of eight, each with an agent of its own; everything is
loopback.  The ways to start take turns.  A world's time is from the first rank's call of
init_process_group to the last one's return, of its last collective where there are groups; the
tables show medians.  A client of torch's store that comes before rank 0 listens is refused and
tries again 0.25 to 0.75 s later, so that a world of torch's takes tens of ms or more than half a
second: `at best` compares the lowest times, and `groups` is what came after every rank's init.

Reverse DNS look-ups, which torch's store makes for every connection, are numeric in every way
(native/getnameinfo.c).  Store operations are calls of the rank's TCPStore, counted in a world of
their own, without what its constructor sends.  `busiest` is what the one process that serves most
was asked for: torch's server all that ranks sent it for these calls; of commkit's agents the one
with the highest count of requests for keys, those of agents included, and what it asked for itself.
Connections and segments are the kernel's TCP
counters of a network namespace (root only), divided by the ranks, from the fork to the last exit;
a rank's connection to its agent is a Unix socket and not among them.  `processor` is the time of
the ranks, and of the agents up to then, divided by the ranks.

Back ends: gloo; `none`, torch's FakeProcessGroup under another name: it has no transport, so that
only the store and the join are left; and `ids`, which besides exchanges ids as NCCL's does.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import _ranks
from _bars import Bars, machine
from _native import preload

_ranks.restart(preload("getnameinfo"))

import _group_arm  # noqa: E402
import _group_set  # noqa: E402
import torch  # noqa: E402
from _worlds import A_HOST, HOW, Way, in_turns  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

WAYS = {
    "stock": Way("torch as it ships"),
    "barrier": Way("torch, TORCH_DIST_INIT_BARRIER=1", {"TORCH_DIST_INIT_BARRIER": "1"}),
    "lazy": Way("torch, TORCH_GLOO_LAZY_INIT=1", {"TORCH_GLOO_LAZY_INIT": "1"}),
    "commkit": Way("commkit.init_process_group", native=True),
    "patched": Way("torch.distributed.init_process_group under commkit's patch", patched=True),
}
BACKENDS = ("none", "gloo")
BAR = 1.1
BAR_FROM = 32


def measure(ranks: int, backend: str, ways: list[str], repeats: int, bars: Bars) -> dict[str, Any]:
    """Every way in turns; way -> medians."""
    chosen = {way: WAYS[way] for way in ways}
    rows = in_turns(ranks, backend, chosen, dict.fromkeys(ways, dict), dict.fromkeys(ways, repeats))
    return {way: bars.keep(part="init", how=HOW, **row) for way, row in rows.items()}


def show(rows: dict[str, Any], console: Console) -> None:
    first = next(iter(rows.values()))
    ranks, backend = first["ranks"], first["backend"]
    count = -(-ranks // A_HOST)
    hosts = f"{count} simulated host{'s' * (count > 1)}"
    table = Table(
        title=f"{backend}, {ranks} ranks on {hosts}, loopback; ms",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("")
    for column in (
        "world",
        "lowest",
        "highest",
        "to torch",
        "at best",
        "to barrier",
        "a rank",
        "processor",
        "store ops",
        "connections",
        "segments",
    ):
        table.add_column(column, justify="right", no_wrap=True)

    def number(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    for way, row in rows.items():
        ratios = [
            row[what] / rows[base][what]
            for what, base in (("seconds", "stock"), ("lowest", "stock"), ("seconds", "barrier"))
        ]
        table.add_row(
            way,
            *(number(1e3 * row[name]) for name in ("seconds", "lowest", "highest")),
            *(number(ratio, 2) for ratio in ratios),
            number(1e3 * row["rank_seconds"]),
            number(1e3 * row["processor_seconds"] / ranks, 2),
            *(number(row[f"{what}_a_rank"]) for what in ("operations", "connections", "segments")),
        )
    console.print(table)
    for way in ("commkit", "patched"):
        phases = ", ".join(f"{k} {1e3 * v:.1f}" for k, v in rows[way]["phases"].items())
        console.print(f"  {way}: median rank's {phases}", highlight=False, soft_wrap=True)
    console.print()


def init_part(options: Any, sizes: list[int], console: Console, bars: Bars) -> None:
    for way, what in WAYS.items():
        console.print(f"  {way}: {what.meaning}", highlight=False)
    console.print()
    for backend in options.backends.split(","):
        for ranks in sizes:
            if backend == "gloo" and ranks > options.gloo_up_to:
                continue
            ways = [way for way in WAYS if way != "lazy" or backend == "gloo"]
            rows = measure(ranks, backend, ways, options.repeats, bars)
            show(rows, console)
            if ranks >= BAR_FROM:
                for way in ("commkit", "patched"):
                    ratio = rows[way]["seconds"] / rows["stock"]["seconds"]
                    bars.check(f"{way}_over_torch_{backend}_{ranks}", ratio, "<=", BAR)


def group_part(options: Any, sizes: list[int], console: Console, bars: Bars) -> None:
    console.print("With Megatron's groups and the first collective of each:", highlight=False)
    for way, what in _group_arm.WAYS.items():
        console.print(f"  {way}: {what.meaning}", highlight=False)
    console.print()
    found = {}
    for backend in options.group_backends.split(","):
        for ranks in sizes:
            if backend == "gloo" and ranks > options.lazy_gloo_up_to:
                continue
            rows = _group_arm.measure(ranks, backend, options.repeats, options.gloo_up_to, bars)
            _group_arm.show(rows, console)
            found[backend, ranks] = rows
    _group_arm.judge(found, max(sizes), bars)


def main() -> int:
    bars = Bars("start_up", __doc__ or "")
    add = bars.parser.add_argument
    add("--ranks", help="comma-separated world sizes (default 8 to 256, with groups 8 to 512)")
    add("--parts", default="init,groups", help="of init, groups (default both)")
    add("--backends", default=",".join(BACKENDS), help="of none, gloo (default both)")
    add("--group-backends", default=",".join(_group_arm.BACKENDS), help="of ids, none, gloo")
    add("--repeats", type=int, default=5, help="worlds of each way and size (default 5)")
    add("--gloo-up-to", type=int, default=64, help="largest world with gloo's full mesh (64)")
    add("--lazy-gloo-up-to", type=int, default=128, help="with gloo and groups otherwise (128)")
    options = bars.parse()
    sizes = [8, 16, 32] if options.quick else [8, 16, 32, 64, 128, 256, 512]
    if options.ranks:
        sizes = [int(part) for part in options.ranks.split(",")]
    options.repeats = 1 if options.quick else options.repeats
    torch.set_num_threads(1)
    _group_set.register()
    limit = _ranks.raise_file_limit()
    here = machine()
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(
        f"Start-up of real ranks, {A_HOST} to a simulated host, loopback; torch "
        f"{torch.__version__}, {here['architecture']}, {here['cores']} cores, load {here['load']}, "
        f"{limit} open files a process",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"gloo's full mesh up to {options.gloo_up_to} ranks (--gloo-up-to): as torch ships it, each"
        " rank connects to each other one",
        highlight=False,
        soft_wrap=True,
    )
    for name in [name for name in os.environ if name.startswith(("COMMKIT_", "TORCH"))]:
        if name != _ranks.ISOLATED:
            del os.environ[name]
    os.environ.pop("XDG_RUNTIME_DIR", None)
    with tempfile.TemporaryDirectory() as logs:
        os.environ["TMPDIR"] = logs  # where agents write their logs if nobody says
        parts = options.parts.split(",")
        if "init" in parts:
            init_part(options, [n for n in sizes if options.ranks or n <= 256], console, bars)
        if "groups" in parts:
            group_part(options, sizes, console, bars)
    return bars.finish()


if __name__ == "__main__":
    sys.exit(main())
