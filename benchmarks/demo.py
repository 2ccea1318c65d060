#!/usr/bin/env python3
"""The main job on one machine: start-up by phase beside stock torch, groups, an all-reduce sweep.

Four local ranks over loopback, new processes for every cycle, forked after torch is imported.  The
three ways to start take turns, so that a busy moment of the machine meets all of them.  Times are
of the slowest rank; what four ranks on one host show of a start-up is its fixed cost, not how it
grows with the world.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _bars import Bars, machine
from rich.console import Console
from rich.table import Table

RANKS = 4
LAYOUT = "tp=2,dp=2"
DEADLINE = 60.0
ROOT = Path(__file__).resolve().parent.parent

#: way to start -> (column, variables)
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "commkit": ("commkit", {}),
    "stock": ("torch", {"COMMKIT_DISABLE": "1"}),
    "barrier": ("torch, barrier", {"COMMKIT_DISABLE": "1", "TORCH_DIST_INIT_BARRIER": "1"}),
}

#: phase -> what it is in either case
PHASES = {
    "find the world": "read the launcher's variables; all ranks join the agent tree",
    "store": "commkit: connect to the host's agent; torch: all ranks to rank 0's TCPStore",
    "process group": "torch's gloo; by commkit it connects on first use, as shipped at once",
    "first all_reduce": "of one float; connections that were put off are made here",
}


def launched(rank: int, port: int) -> dict[str, str]:
    """What a launcher would set."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "COMMKIT_JOB_ID": f"demo-{os.getppid()}-{port}",
    }


def start_up(rank: int, port: int, way: str, pipe: Any) -> None:
    """One rank: waits for the word, starts, sends seconds by phase."""
    os.environ.update(WAYS[way][1])
    os.environ.update(launched(rank, port))
    torch.set_num_threads(1)
    from commkit import api

    rendezvous = [0.0]
    c10d: Any = dist.distributed_c10d
    original = c10d.rendezvous

    def timed(*arguments: Any, **named: Any) -> Iterator[Any]:
        began = time.perf_counter()
        for found in original(*arguments, **named):
            rendezvous[0] = time.perf_counter() - began
            yield found

    c10d.rendezvous = timed
    value = torch.ones(1)
    pipe.send("ready")
    pipe.recv()
    began = time.perf_counter()
    api.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE))
    started = time.perf_counter()
    dist.all_reduce(value)
    reduced = time.perf_counter()
    assert value.item() == RANKS
    if way == "commkit":
        phases = api.start_up_phases()
        found, store = phases["resolve"] + phases["join"], phases["store"]
    else:
        found, store = 0.0, rendezvous[0]
    pipe.send(
        {
            "find the world": found,
            "store": store,
            "process group": started - began - found - store,
            "first all_reduce": reduced - started,
            "all": reduced - began,
        }
    )
    dist.barrier()
    api.destroy_process_group()


def cycle(way: str) -> dict[str, float]:
    """Starts RANKS processes one way; seconds of the slowest rank, by phase."""
    times = world(start_up, way)
    return {phase: max(each[phase] for each in times) for phase in times[0]}


def world(body: Callable[..., None], *arguments: str) -> list[Any]:
    """What RANKS processes send that all start at one word: body(rank, port, *arguments, pipe)."""
    what = " ".join(("a rank", *arguments))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    try:
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            told = (rank, port, *arguments, theirs)
            process = context.Process(target=body, args=told, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            answer(pipe, what)
        for pipe in pipes:
            pipe.send("go")
        answers = [answer(pipe, what) for pipe in pipes]
        for process in processes:
            process.join(DEADLINE)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return answers


def answer(pipe: multiprocessing.connection.Connection, what: str) -> Any:
    if not pipe.poll(DEADLINE):
        sys.exit(f"demo: {what} was silent for {DEADLINE:.0f} s")
    try:
        return pipe.recv()
    except EOFError:
        sys.exit(f"demo: {what} died; its error is above")


def show(console: Console, results: dict[str, list[dict[str, float]]], cycles: int) -> None:
    table = Table(
        title=f"Start-up in ms: medians of {cycles} cycles",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("")
    for column, _ in WAYS.values():
        table.add_column(column, justify="right", no_wrap=True)
    for phase in (*PHASES, "all"):
        cells = []
        for way in WAYS:
            values = [1e3 * each[phase] for each in results[way]]
            cells.append(f"{statistics.median(values):.1f}" if any(values) else "-")
        table.add_row(phase, *cells, style="bold" if phase == "all" else "")
    for name, pick in (("  lowest", min), ("  highest", max)):
        cells = [f"{1e3 * pick(each['all'] for each in results[way]):.1f}" for way in WAYS]
        table.add_row(name, *cells, style="dim")
    console.print(table)
    console.print()
    for phase, meaning in PHASES.items():
        console.print(f"  {phase}: {meaning}", style="dim", highlight=False, soft_wrap=True)


def groups(rank: int, port: int, pipe: Any) -> None:
    """One rank of a world with a layout; rank 0 sends the start-up report."""
    os.environ.update(launched(rank, port))
    torch.set_num_threads(1)
    import commkit

    pipe.send("ready")
    pipe.recv()
    commkit.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE), layout=LAYOUT)
    pipe.send(commkit.start_report(first_use=True))
    commkit.destroy_process_group()


def show_report(console: Console, report: dict[str, Any]) -> None:
    title = f"Start-up report of a world with {LAYOUT}, ms (commkit.start_report)"
    console.print(title, style="italic", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for column in ("slowest", "rank", "median", "fastest", "ranks"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, phase in report["phases"].items():
        slowest, median, fastest = (
            f"{1e3 * phase[place]['seconds']:.1f}" for place in ("slowest", "median", "fastest")
        )
        rank = str(phase["slowest"]["rank"])
        table.add_row(name, slowest, rank, median, fastest, str(phase["ranks"]))
    console.print(table)


def sweep(quick: bool, json_file: str | None) -> int:
    sizes = ["-b", "8", "-e", "1K" if quick else "16M", "-f", "8", "-n", "3" if quick else "10"]
    command = [sys.executable, "-m", "commkit", "bench", "all_reduce", "--nproc", str(RANKS)]
    command += [*sizes, "--backend", "gloo", *(["--json", json_file] if json_file else [])]
    print("$ commkit " + " ".join(command[3:]), flush=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode


def main() -> int:
    bars = Bars("demo", __doc__.splitlines()[0])
    options = bars.parse()
    cycles = 2 if options.quick else 9
    here = machine()
    console = Console()
    console.print(
        f"{RANKS} local ranks, loopback, gloo; torch {torch.__version__}, "
        f"{here['architecture']}, {here['cores']} cores, load {here['load']}\n"
    )
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(cycles):
        for way in WAYS:
            took = cycle(way)
            results[way].append(took)
            bars.keep(way=way, cycle=number, ranks=RANKS, how="local ranks, loopback", seconds=took)
    show(console, results, cycles)
    console.print()
    report = world(groups)[0]
    bars.keep(how="local ranks, loopback", report=report)
    show_report(console, report)
    console.print()
    code = sweep(options.quick, options.json)
    bars.check("exit_code_of_the_sweep", code, "==", 0)
    return bars.finish() or code


if __name__ == "__main__":
    sys.exit(main())
