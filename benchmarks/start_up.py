#!/usr/bin/env python3
"""init_process_group beside stock torch: real ranks on one machine, forked after the imports.

Ranks are grouped into simulated hosts of eight, each with an agent of its own; everything is
loopback.  The ways to start take turns.  A world's time is from the first rank's call of
init_process_group to the last one's return; the table shows medians.  A client of torch's store
that comes before rank 0 listens is refused and tries again 0.25 to 0.75 s later, so that a world of
torch's takes tens of ms or more than half a second: `at best` compares the lowest times.

Reverse DNS look-ups, which torch's store makes for every connection, are numeric in every way
(native/getnameinfo.c).  Store operations are calls of the rank's TCPStore, counted in a world of
their own, without what its constructor sends.  Connections and segments are the kernel's TCP
counters of a network namespace (root only), divided by the ranks, from the fork to the last exit;
a rank's connection to its agent is a Unix socket and not among them.  `processor` is the time of
the ranks, and of the agents up to then, divided by the ranks.

Back ends: gloo, and `none`, torch's FakeProcessGroup under another name: it has no transport, so
that only the store and the join are left (under the name fake torch makes no store at all).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import _ranks
from _bars import Bars, machine
from _native import preload

_ranks.restart(preload("getnameinfo"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch._C._distributed_c10d import FakeProcessGroup, Store  # noqa: E402

from commkit import api, patch  # noqa: E402

A_HOST = 8
TIMEOUT = timedelta(seconds=120)

#: way -> (what it is, variables)
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "stock": ("torch as it ships", {}),
    "barrier": ("torch, TORCH_DIST_INIT_BARRIER=1", {"TORCH_DIST_INIT_BARRIER": "1"}),
    "lazy": ("torch, TORCH_GLOO_LAZY_INIT=1", {"TORCH_GLOO_LAZY_INIT": "1"}),
    "commkit": ("commkit.init_process_group", {}),
    "patched": ("torch.distributed.init_process_group under commkit's patch", {}),
}
BACKENDS = ("none", "gloo")
BAR = 1.1
BAR_FROM = 32


def _no_transport(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    create: Any = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    return create(rank, size)


def environments(ranks: int, way: str, port: int, job: str) -> list[dict[str, str]]:
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank % A_HOST),
            "LOCAL_WORLD_SIZE": str(min(A_HOST, ranks - rank // A_HOST * A_HOST)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "COMMKIT_HOST_ID": f"host{rank // A_HOST}",
            "COMMKIT_JOB_ID": job,
            **WAYS[way][1],
        }
        for rank in range(ranks)
    ]


class Operations:
    """Counts the calls that reach this rank's TCPStore, the constructor's own traffic aside."""

    def __init__(self) -> None:
        self.count = 0

    def install(self) -> None:
        for name in ("torch.distributed.rendezvous", "commkit.store"):
            module: Any = importlib.import_module(name)
            original = module.TCPStore
            module.TCPStore = lambda *a, _real=original, **k: self.wrap(_real(*a, **k))

    def wrap(self, inner: Any) -> Any:
        counter = self

        class Counting(Store):
            def set_timeout(self, timeout: timedelta) -> None:
                super().set_timeout(timeout)
                inner.set_timeout(timeout)

            def has_extended_api(self) -> bool:
                return bool(inner.has_extended_api())

        def counted(name: str) -> Callable[..., Any]:
            def call(self: Any, *arguments: Any) -> Any:
                counter.count += 1
                return getattr(inner, name)(*arguments)

            return call

        single = "set get add wait check append compare_set multi_get multi_set"
        for name in f"{single} delete_key num_keys queue_push queue_pop queue_len".split():
            setattr(Counting, name, counted(name))
        # Torch's C++ side looks these two up under their C++ names.
        setattr(Counting, "deleteKey", counted("delete_key"))  # noqa: B010
        setattr(Counting, "getNumKeys", counted("num_keys"))  # noqa: B010
        made = Counting()
        kept.append(made)
        return made


kept: list[Any] = []  # torch does not keep a Python Store's Python half alive


def starter(way: str, backend: str, counting: bool) -> Callable[[], Callable[[], dict[str, Any]]]:
    """What a rank does before the word, and after it."""

    def ready() -> Callable[[], dict[str, Any]]:
        operations = Operations()
        if counting:
            operations.install()
        if way == "patched":
            patch.install()
        init = api.init_process_group if way == "commkit" else dist.init_process_group

        def start() -> dict[str, Any]:
            used = _processor_seconds()
            began = time.monotonic()
            init(backend, timeout=TIMEOUT)
            ended = time.monotonic()
            report: dict[str, Any] = {
                "began": began,
                "ended": ended,
                "operations": operations.count,
            }
            report["processor"] = _processor_seconds() - used
            if world := api.world():
                report["phases"] = api.start_up_phases()
                if world.identity.local_rank == 0:
                    report["processor"] += _agent_seconds(world.identity.agent_pid)
            assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
            return report

        return start

    return ready


def _processor_seconds() -> float:
    """Of this process and of children that it has waited for (an agent's first steps)."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


def _agent_seconds(pid: int) -> float:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) * 1e-9
    return 0.0


def finish() -> None:
    if api.world() is not None:
        api.destroy_process_group()


@contextlib.contextmanager
def quiet_after() -> Iterator[None]:
    """The agents of a cycle are gone before the next one begins."""
    before = _ranks.agents_here()
    yield
    deadline = time.monotonic() + 10
    while _ranks.agents_here() - before and time.monotonic() < deadline:
        time.sleep(0.005)


cycles = iter(range(1 << 20))


def cycle(ranks: int, way: str, backend: str, counting: bool = False) -> dict[str, Any]:
    """One world's start-up."""
    number = next(cycles)
    port = _ranks.free_port(number + os.getpid())
    rows = environments(ranks, way, port, f"start-up-{os.getpid()}-{number}")
    before = _ranks.tcp_counters()
    with quiet_after():
        reports = _ranks.world(rows, starter(way, backend, counting), finish, 300)
    after = _ranks.tcp_counters()
    took: dict[str, Any] = {
        "seconds": max(r["ended"] for r in reports) - min(r["began"] for r in reports),
        "rank_seconds": statistics.median(r["ended"] - r["began"] for r in reports),
        "processor_seconds": sum(r["processor"] for r in reports),
        "store_operations": sum(r["operations"] for r in reports) if counting else None,
        "phases": {},
    }
    if _ranks.isolated():
        took["connections"] = after["ActiveOpens"] - before["ActiveOpens"]
        took["segments"] = after["OutSegs"] - before["OutSegs"]
    if "phases" in reports[0]:
        names = reports[0]["phases"]
        took["phases"] = {
            name: statistics.median(r["phases"][name] for r in reports) for name in names
        }
    return took


def measure(ranks: int, backend: str, ways: list[str], repeats: int, bars: Bars) -> dict[str, Any]:
    """Every way in turns; way -> medians."""
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(repeats):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            taken[way].append(cycle(ranks, way, backend))
    rows: dict[str, Any] = {}
    for way in ways:
        operations = cycle(ranks, way, backend, counting=True)["store_operations"]
        cycles_of = taken[way]
        seconds = [one["seconds"] for one in cycles_of]
        row: dict[str, Any] = {"way": way, "backend": backend, "ranks": ranks}
        for name in ("seconds", "rank_seconds", "processor_seconds"):
            row[name] = round(statistics.median(one[name] for one in cycles_of), 6)
        row["lowest"], row["highest"] = round(min(seconds), 6), round(max(seconds), 6)
        row["operations_a_rank"] = round(operations / ranks, 3)
        for name in ("connections", "segments"):
            counts = [one[name] for one in cycles_of if name in one]
            row[f"{name}_a_rank"] = round(statistics.median(counts) / ranks, 3) if counts else None
        row["phases"] = {
            name: round(statistics.median(one["phases"][name] for one in cycles_of), 6)
            for name in cycles_of[0]["phases"]
        }
        how = "real ranks on simulated hosts of 8, loopback"
        rows[way] = bars.keep(how=how, repeats=repeats, **row)
    return rows


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


def main() -> int:
    bars = Bars("start_up", __doc__ or "")
    add = bars.parser.add_argument
    add("--ranks", help="comma-separated world sizes (default 8 to 256)")
    add("--backends", default=",".join(BACKENDS), help="of none, gloo (default both)")
    add("--repeats", type=int, default=5, help="worlds of each way and size (default 5)")
    add("--gloo-up-to", type=int, default=64, help="largest world with gloo (default 64)")
    options = bars.parse()
    sizes = [8, 16, 32] if options.quick else [8, 16, 32, 64, 128, 256]
    if options.ranks:
        sizes = [int(part) for part in options.ranks.split(",")]
    repeats = 1 if options.quick else options.repeats
    torch.set_num_threads(1)
    dist.Backend.register_backend("none", _no_transport, devices=["cpu"])
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
        f"gloo up to {options.gloo_up_to} ranks (--gloo-up-to): as torch ships it, each rank "
        "connects to each other one",
        highlight=False,
        soft_wrap=True,
    )
    for way, (meaning, _) in WAYS.items():
        console.print(f"  {way}: {meaning}", highlight=False)
    console.print()
    for name in [name for name in os.environ if name.startswith(("COMMKIT_", "TORCH"))]:
        if name != _ranks.ISOLATED:
            del os.environ[name]
    os.environ.pop("XDG_RUNTIME_DIR", None)
    with tempfile.TemporaryDirectory() as logs:
        os.environ["TMPDIR"] = logs  # where agents write their logs if nobody says
        for backend in options.backends.split(","):
            for ranks in sizes:
                if backend == "gloo" and ranks > options.gloo_up_to:
                    continue
                ways = [way for way in WAYS if way != "lazy" or backend == "gloo"]
                rows = measure(ranks, backend, ways, repeats, bars)
                show(rows, console)
                if ranks >= BAR_FROM:
                    for way in ("commkit", "patched"):
                        ratio = rows[way]["seconds"] / rows["stock"]["seconds"]
                        bars.check(f"{way}_over_torch_{backend}_{ranks}", ratio, "<=", BAR)
    return bars.finish()


if __name__ == "__main__":
    sys.exit(main())
