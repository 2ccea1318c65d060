"""Collectives of several families at the same time, as a training step has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from commkit.measure.backend import Backend, Buffer, Unsupported
from commkit.measure.engine import Half, Job, Result, operation, placement, unpack
from commkit.measure.operation import Operation
from commkit.measure.patterns import pattern_for
from commkit.measure.verify import Check, check_received, prepare


def _call(running: Sequence[tuple[Any, Operation]]) -> Callable[[], None]:
    """Issues every family's call, then waits for all."""

    def call() -> None:
        works = [work for backend, op in running for work in backend.start(op)]
        for work in works:
            work.wait()

    return call


def measure_together(
    control: Backend,
    groups: Sequence[tuple[Backend | None, int]],
    jobs: Sequence[Job],
    buffers: Sequence[tuple[Buffer, Buffer]],
    *,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
    phase: Callable[[str], None] = lambda name: None,
) -> list[Result]:
    """One result a family; all have the same times, until the last family's call was done.

    `groups` holds this rank's group of each family (None if it is in none) and its size.
    Collective over `control`; raises Unsupported where a back end cannot have calls in flight.
    """
    placements: list[list[Any]] = [[] for _ in jobs]
    stopped = False
    for inside in (False, True):
        where = "in place" if inside else "out of place"
        ops = [
            None if backend is None else operation(backend, job, pair, inside)
            for (backend, _), job, pair in zip(groups, jobs, buffers, strict=True)
        ]
        running = [
            (backend, op)
            for (backend, _), op in zip(groups, ops, strict=True)
            if backend is not None and op is not None
        ]
        for backend, _ in running:
            if not hasattr(backend, "start"):
                raise Unsupported(f"{backend.name} has no calls that are waited for later")
        call = _call(running)
        phase(f"warm-up {where}")
        for _, op in running:
            op.send.zero_()
            op.receive.zero_()
        for _ in range(jobs[0].warmup):
            call()
        control.synchronize()
        control.barrier()
        phase(f"timing {where}")
        times = control.time(call, jobs[0].iterations)
        checks: list[Check | None] = [None] * len(jobs)
        if jobs[0].checks and control.verifies:
            phase(f"verification {where}")
            checks = _verified(groups, jobs, ops, seed + inside, call, control)
        phase("gathering results")
        for at, (job, (_, n)) in enumerate(zip(jobs, groups, strict=True)):
            rows = control.gather([float(stop()), *Half(times, checks[at]).pack()])
            stopped = stopped or any(row[0] for row in rows)
            shape = job.row.shape(job.size, job.number.size, n)
            placements[at].append(
                placement(
                    [unpack(row[1:]) for row in rows],
                    inside,
                    shape.total * job.number.size,
                    job.row.busbw_factor(n),
                )
            )
    results = []
    for job, (_, n), (outer, inner) in zip(jobs, groups, placements, strict=True):
        shape = job.row.shape(job.size, job.number.size, n)
        size = shape.total * job.number.size
        root = job.root if job.row.rooted else -1
        results.append(Result(shape.part, size, outer, inner, stopped, root))
    return results


def _verified(
    groups: Sequence[tuple[Backend | None, int]],
    jobs: Sequence[Job],
    ops: Sequence[Operation | None],
    seed: int,
    call: Callable[[], None],
    control: Backend,
) -> list[Check | None]:
    """One pass with fresh data in all families at once."""
    patterns = [
        pattern_for(job.number, job.redop, n) if job.row.reduces else None
        for job, (_, n) in zip(jobs, groups, strict=True)
    ]
    for job, op, pattern in zip(jobs, ops, patterns, strict=True):
        if op is not None:
            prepare(op, job.number, pattern, seed)
    control.synchronize()
    call()
    control.synchronize()
    found: list[Check | None] = []
    for job, op, pattern in zip(jobs, ops, patterns, strict=True):
        nothing = op is None or not job.row.moves or (job.row.reduces and pattern is None)
        found.append(
            None if nothing or op is None else check_received(op, job.number, pattern, seed)
        )
    return found
