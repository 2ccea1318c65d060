"""What a plan would do: rows, memory, and about how long it takes.  Starts nothing."""

from __future__ import annotations

import math

from commkit.bench.arguments import Arguments
from commkit.measure.collectives import Collective

#: Assumed where nothing is known: a call's fixed cost, and a rank's bandwidth in 1e9 bytes/s.
LATENCY = 50e-6
BANDWIDTH = 1.0
#: Filling and comparing an element on one core.
_CHECK = 60e-9
#: Starting: joining and connecting, without the import of torch.
_START = 2.0


def memory(row: Collective, size: int, element: int, n: int) -> int:
    """Bytes of the buffers of one rank: both sides, and a copy where the row sends from one."""
    shape = row.shape(size, element, n)
    staged = row.name in ("all_to_all", "all_to_all_v") or row.partner(0, 2) is not None
    return (shape.send + shape.receive + (shape.send if staged else 0)) * element


def call_seconds(row: Collective, size: int, element: int, n: int, bandwidth: float) -> float:
    """latency * steps of a tree + bytes over a rank's link (docs/bench.md)."""
    total = row.shape(size, element, n).total * element
    steps = max(1.0, math.log2(max(2, n)))
    return LATENCY * steps + total * row.busbw_factor(n) / (bandwidth * 1e9)


def row_seconds(plan: Arguments, row: Collective, element: int, n: int) -> float:
    bandwidth = plan.link or BANDWIDTH
    total = 0.0
    for size in plan.sizes() if row.moves else (0,):
        once = call_seconds(row, size, element, n, bandwidth) * plan.aggregated
        timed = plan.iterations * once
        if plan.budget is not None:
            timed = min(timed, plan.budget) if not plan.precision else plan.budget
        elements = row.shape(size, element, n).receive
        checked = plan.checks * (once + elements * _CHECK) if row.moves else 0.0
        total += 2 * (plan.warmup * once + timed + checked)
    return total


def lines(plan: Arguments, n: int) -> list[str]:
    """The plan as a text of `# ` lines; `n` ranks take part."""
    sizes = plan.sizes()
    pairs = len(plan.numbers) * len(plan.redops)
    element = max(number.size for number in plan.numbers)
    rows = [row for _, row in plan.concurrent] or list(plan.rows)
    found = [
        f"# dry run: nothing is started; {n} ranks, backend {plan.backend}, "
        f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]} bytes"
    ]
    seconds = _START
    for row in rows:
        many = pairs if row.reduces else len(plan.numbers)
        took = row_seconds(plan, row, element, n) * many
        seconds += took
        need = memory(row, sizes[-1] if row.moves else 0, element, n)
        found.append(
            f"# {row.name}: {many} of type and reduction, {plan.iterations} iterations at most, "
            f"{need / 2**20:.1f} MiB of buffers a rank, about {took:.1f} s"
        )
    link = f"{plan.link:g} GB/s (--link-speed)" if plan.link else f"{BANDWIDTH:g} GB/s (assumed)"
    found.append(
        f"# in all about {seconds:.0f} s with {link} a rank and {LATENCY * 1e6:g} us a step "
        "(assumed): an estimate, not a measurement"
    )
    return found
