#!/usr/bin/env python3
"""What commkit bench adds to a call beside a loop written by hand, and how long it takes alone.

Each comparison is paired: blocks of iterations alternate between the harness and the loop, in the
same processes on the same buffers, and the ratio of their medians gets a 95 % interval over blocks.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _bars import Bars

ROOT = Path(__file__).resolve().parents[1]
#: Elements: small, so that what the harness adds is not lost in the transfer, and larger.
COUNTS = (2, 16384)
Loop = Callable[[int], list[float]]


def by_hand(call: Callable[[], Any]) -> Loop:
    """The loop that everybody writes."""

    def loop(iterations: int) -> list[float]:
        times = []
        for _ in range(iterations):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return times

    return loop


def paired(
    harness: Loop, hand: Loop, barrier: Callable[[], None], blocks: int, iterations: int
) -> list[tuple[float, float]]:
    """(median of the harness, median of the loop) of each block.

    A block is one, the other, the other, the one, and chance says which: a machine that becomes
    slower meanwhile, or does something else now and then, does so for both.  Many short blocks
    rather than few long ones, since what else a machine does lasts.
    """
    found = []
    draw = random.Random(5)  # the same on every rank
    for _ in range(blocks):
        times: dict[Loop, list[float]] = {harness: [], hand: []}
        first, second = (harness, hand) if draw.random() < 0.5 else (hand, harness)
        for which in (first, second, second, first):
            barrier()
            which(3)  # whoever comes first pays for cold caches
            barrier()
            times[which] += which(iterations)
        found.append((statistics.median(times[harness]), statistics.median(times[hand])))
    return found


def interval(ratios: list[float], draws: int = 2000) -> tuple[float, float, float]:
    """(low, median, high): a percentile bootstrap of the median over blocks."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], statistics.median(ratios), medians[int(0.975 * draws)]


def off_one(low: float, high: float) -> float:
    """How far 1.0 is outside the interval; 0 inside."""
    return max(0.0, low - 1.0, 1.0 - high)


def operation(backend: Any, count: int) -> Any:
    from commkit.measure.collectives import ALL_REDUCE
    from commkit.measure.engine import Job
    from commkit.measure.engine import operation as make
    from commkit.measure.numbers import NUMBERS

    number = NUMBERS["float"]
    job = Job(ALL_REDUCE, number, "sum", count * number.size, 1, 0, 0)
    return make(backend, job, (backend.buffer(count, number), backend.buffer(count, number)), True)


def fake(blocks: int, iterations: int) -> float:
    """Microseconds that the harness adds to a call of torch's fake group."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from commkit.measure.torch_backend import FakeBackend

    store: Any = FakeStore()
    dist.init_process_group("fake", rank=0, world_size=256, store=store)
    backend = FakeBackend("fake", torch.device("cpu"))
    op = operation(backend, 2)
    harness = backend.caller(op, "blocking", 1)
    pairs = paired(
        functools.partial(backend.time, harness),
        by_hand(functools.partial(dist.all_reduce, op.receive)),
        lambda: None,
        blocks,
        iterations,
    )
    dist.destroy_process_group()
    return statistics.median(a - b for a, b in pairs) * 1e6


def gloo_rank(place: Any, blocks: int, iterations: int) -> int:
    import torch
    import torch.distributed as dist

    from commkit.measure.torch_backend import TorchBackend

    dist.init_process_group(
        "gloo", init_method=place.init_method, rank=place.rank, world_size=place.world_size
    )
    torch.set_num_threads(1)
    backend = TorchBackend("gloo", torch.device("cpu"))
    for count in COUNTS:
        op = operation(backend, count)
        harness = backend.caller(op, "blocking", 1)
        pairs = paired(
            functools.partial(backend.time, harness),
            by_hand(functools.partial(dist.all_reduce, op.receive)),
            backend.barrier,
            blocks,
            iterations,
        )
        if place.rank == 0:
            print(json.dumps([count, pairs]), flush=True)
    backend.barrier()
    dist.destroy_process_group()
    return 0


def mpi_rank(blocks: int, iterations: int) -> None:
    from mpi4py import MPI

    from commkit.measure.mpi import MpiBackend

    backend = MpiBackend()
    world = MPI.COMM_WORLD
    for count in COUNTS:
        op = operation(backend, count)
        buffer = op.receive.numpy()
        harness = backend.caller(op, "blocking", 1)
        pairs = paired(
            functools.partial(backend.time, harness),
            by_hand(functools.partial(world.Allreduce, MPI.IN_PLACE, buffer)),
            backend.barrier,
            blocks,
            iterations,
        )
        if backend.rank == 0:
            print(json.dumps([count, pairs]), flush=True)


def child(command: list[str]) -> list[tuple[int, list[tuple[float, float]]]]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def judge(bars: Bars, name: str, found: list[Any], slack: float) -> None:
    for count, pairs in found:
        low, middle, high = interval([a / b for a, b in pairs])
        hand = statistics.median(b for _, b in pairs) * 1e6
        print(
            f"{name}, {count * 4} bytes: {hand:.1f} us by hand; harness / hand {middle:.3f} "
            f"[{low:.3f}, {high:.3f}] over {len(pairs)} blocks"
        )
        bars.keep(backend=name, bytes=count * 4, hand_us=hand, ratio=middle, low=low, high=high)
        off = off_one(low, high)
        if slack and abs(middle - 1) <= slack:
            off = 0.0
        bars.check(f"{name}_{count * 4}_ratio_off_1", off, "<=", 0.0)


def alone(bars: Bars, ranks: int) -> None:
    """A bare `commkit bench`: seconds in all, and to the first row after torch's import."""
    imports = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch, torch.distributed"], check=True)
        imports.append(time.monotonic() - began)
    command = [sys.executable, "-m", "commkit", "bench", "--nproc", str(ranks)]
    began = time.monotonic()
    first = math.nan
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if math.isnan(first) and line.strip() and not line.startswith("#"):
                first = time.monotonic() - began
    if process.returncode:
        raise SystemExit(f"commkit bench: exit {process.returncode}")
    took = time.monotonic() - began
    imported = statistics.median(imports)
    print(
        f"commkit bench, {ranks} local ranks: {took:.1f} s in all; first row after {first:.2f} s, "
        f"of which torch's import {imported:.2f} s"
    )
    bars.keep(part="default", ranks=ranks, seconds=took, first_row=first, torch_import=imported)
    bars.check("default_seconds", took, "<", 60)
    bars.check("first_row_after_import_seconds", first - imported, "<=", 2)


def main() -> int:
    bars = Bars("bench_overhead", __doc__ or "")
    bars.parser.add_argument("--rank", choices=("gloo", "mpi"), help="what this runs itself with")
    options = bars.parse()
    blocks, iterations = (6, 20) if options.quick else (200, 15)
    if options.rank == "mpi":
        mpi_rank(blocks, iterations)
        return 0
    if options.rank == "gloo":
        import torch.distributed  # noqa: F401 - once, before the fork

        from commkit.bench.main import local

        return local(2, lambda place: gloo_rank(place, blocks, iterations))
    quick = ["--quick"] if options.quick else []
    mine = [sys.executable, str(Path(__file__).resolve())]
    judge(bars, "gloo", child([*mine, "--rank", "gloo", *quick]), 0.0)
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if mpiexec.exists():
        found = child([str(mpiexec), "-n", "2", *mine, "--rank", "mpi", *quick])
        judge(bars, "mpi", found, 0.10)
    else:
        print(f"mpi: left out, no {mpiexec} (pip install mpich mpi4py)")
    added = fake(blocks, 50 * iterations)
    print(f"fake group: the harness adds {added:.2f} us to a call")
    bars.keep(backend="fake", added_us=added)
    bars.check("added_us_a_call", added, "<=", 3)
    if not options.quick:
        alone(bars, 4)
    return bars.finish()


if __name__ == "__main__":
    sys.exit(main())
