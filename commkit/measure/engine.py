"""One size of one collective: warm-up, timing, verification, and one gather of what came out."""

from __future__ import annotations

import math
import statistics as python_statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from commkit.measure import statistics
from commkit.measure.backend import Backend, Buffer
from commkit.measure.collectives import Collective, Shape
from commkit.measure.numbers import Number
from commkit.measure.operation import Operation
from commkit.measure.patterns import pattern_for
from commkit.measure.verify import Check, verify
from commkit.records import WrongElement

_NOT_VERIFIED = -1
#: Under a time budget: a median needs three values, and no size is worth more than this many.
FEWEST, MOST = 3, 10_000


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure.  `size` in bytes is rounded down as the row's shape says.

    `budget` are the seconds for the timed iterations of a placement, of which there are then
    FEWEST to `iterations`.  With `precision` batches of `iterations` are repeated until half the
    95 % interval of the median is at most that share of it, or the budget has been spent.
    """

    row: Collective
    number: Number
    redop: str
    size: int
    iterations: int
    warmup: int
    checks: int  # verification passes; 0: none
    root: int = 0
    mode: str = "blocking"
    aggregated: int = 1
    budget: float | None = None
    precision: float | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Results out of place or in place, over all ranks; times in seconds, of one call."""

    in_place: bool
    times: tuple[float, ...]  # each iteration's maximum over the ranks
    summary: statistics.Summary
    slowest_rank: int
    slowest_time: float
    algbw: float  # 1e9 bytes a second
    busbw: float | None
    wrong: int | None
    first_wrong: WrongElement | None
    rank_times: tuple[float, ...] = ()  # each rank's median; 0 for a rank in no group
    skew: float = 0.0
    precision: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    count: int
    bytes: int
    out_of_place: Placement
    in_place: Placement
    stop: bool  # a rank asked to stop after this size
    root: int = -1


@dataclass(frozen=True, slots=True)
class Half:
    """One rank's row for one placement; travels as plain numbers."""

    times: list[float]
    check: Check | None

    def pack(self) -> list[float]:
        check = self.check or Check(wrong=_NOT_VERIFIED)
        return [*self.times, check.wrong, check.index, check.got, check.expected]


def unpack(values: Sequence[float]) -> Half:
    *times, wrong, index, got, expected = values
    if wrong == _NOT_VERIFIED:
        return Half(times, None)
    return Half(times, Check(int(wrong), int(index), got, expected))


def _plain(value: float) -> float | str:
    return value if value - value == 0 else str(value)


def _took_part(half: Half) -> bool:
    return not math.isnan(half.times[0])


def placement(halves: Sequence[Half], in_place: bool, size: int, factor: float) -> Placement:
    taking = [(rank, half) for rank, half in enumerate(halves) if _took_part(half)]
    rows = [half.times for _, half in taking]
    times = statistics.slowest_over_ranks(rows)
    summary = statistics.summarize(times)
    at, median = statistics.slowest_rank(rows)
    checks = [half.check for half in halves if half.check is not None]
    first = None
    for bad_rank, half in enumerate(halves):
        if half.check is not None and half.check.wrong:
            check = half.check
            first = WrongElement(bad_rank, check.index, _plain(check.got), check.expected)
            break
    medians = {rank: python_statistics.median(half.times) for rank, half in taking}
    algbw = statistics.algbw(size, summary.p50)
    return Placement(
        in_place=in_place,
        times=times,
        summary=summary,
        slowest_rank=taking[at][0],
        slowest_time=median,
        algbw=algbw,
        busbw=algbw * factor if factor else None,
        wrong=sum(check.wrong for check in checks) if checks else None,
        first_wrong=first,
        rank_times=tuple(medians.get(rank, 0.0) for rank in range(len(halves))),
        skew=statistics.skew(list(medians.values())),
        precision=statistics.precision(times),
    )


class _Clockwork:
    """Warm-up and timing, with the decisions that all ranks take alike."""

    def __init__(self, backend: Backend | None, control: Backend, job: Job) -> None:
        self.backend = backend
        self.control = control
        self.job = job

    def warm_up(self, call: Callable[[], None]) -> float:
        """Seconds of the last warm-up call; one more is made where a budget needs to know."""
        calls = self.job.warmup + (1 if self.job.budget and not self.job.precision else 0)
        took = 0.0
        for _ in range(calls):
            began = time.perf_counter()
            call()
            if self.backend is not None:
                self.backend.synchronize()
            took = time.perf_counter() - began
        return took

    def _batch(self, call: Callable[[], None], iterations: int) -> list[float]:
        if self.backend is None:
            return [math.nan] * iterations
        return [t / self.job.aggregated for t in self.backend.time(call, iterations)]

    def measure(self, call: Callable[[], None]) -> list[float]:
        job = self.job
        took = self.warm_up(call)
        # Ranks leave the last size at different times; the first iteration is not to pay for that.
        self.control.barrier()
        if job.precision is None:
            return self._batch(call, self._iterations(took))
        return self._until_precise(call)

    def _iterations(self, took: float) -> int:
        job = self.job
        if not job.budget:
            return job.iterations
        slowest = max(row[0] for row in self.control.gather([took]))
        self.control.barrier()
        fitting = int(job.budget / slowest) if slowest > 0 else MOST
        return max(min(FEWEST, job.iterations), min(fitting, job.iterations, MOST))

    def _until_precise(self, call: Callable[[], None]) -> list[float]:
        job = self.job
        mine: list[float] = []
        slowest: list[float] = []
        began = time.perf_counter()
        while True:
            batch = self._batch(call, job.iterations)
            mine += batch
            rows = self.control.gather([time.perf_counter() - began, *batch])
            taking = [row[1:] for row in rows if not math.isnan(row[1])]
            slowest += statistics.slowest_over_ranks(taking)
            spread = statistics.precision(slowest)
            spent = max(row[0] for row in rows)
            if spread is not None and spread <= (job.precision or 0.0):
                return mine
            if spent >= (job.budget or 0.0) or len(mine) >= MOST:
                return mine


def operation(
    backend: Backend, job: Job, buffers: tuple[Buffer, Buffer], inside: bool
) -> Operation:
    """The job's operation on `buffers`, the first of which holds the larger side."""
    row = job.row
    shape = row.shape(job.size, job.number.size, backend.world_size)
    main, other = buffers
    root = job.root if row.rooted else 0
    if inside:
        at_send, at_receive = row.inside(backend.rank, shape, root)
        send = main[at_send : at_send + shape.send]
        whole = (at_send, shape.send) == (at_receive, shape.receive)
        receive = send if whole else main[at_receive : at_receive + shape.receive]
    elif shape.send >= shape.receive:
        send, receive = main[: shape.send], other[: shape.receive]
    else:
        send, receive = other[: shape.send], main[: shape.receive]
    return Operation(
        row, shape, send, receive, job.redop, backend.rank, backend.world_size, root, inside
    )


def buffer_counts(row: Collective, size: int, element: int, n: int) -> tuple[int, int]:
    """Elements of the two buffers that `measure` needs: the larger side and the smaller one."""
    shape = row.shape(size, element, n)
    return max(shape.send, shape.receive), min(shape.send, shape.receive)


def _one_placement(
    backend: Backend | None,
    control: Backend,
    job: Job,
    buffers: tuple[Buffer, Buffer],
    inside: bool,
    seed: int,
    phase: Callable[[str], None],
) -> Half:
    where = "in place" if inside else "out of place"
    clockwork = _Clockwork(backend, control, job)
    if backend is None:
        phase(f"waiting for the groups, {where}")
        return Half(clockwork.measure(lambda: None), None)
    op = operation(backend, job, buffers, inside)
    phase(f"warm-up {where}")
    for buffer in (op.send, op.receive):
        buffer.zero_()
    call = backend.caller(op, job.mode, job.aggregated)
    phase(f"timing {where}")
    times = clockwork.measure(call)
    pattern = pattern_for(job.number, job.redop, backend.world_size) if job.row.reduces else None
    nothing = job.row.reduces and pattern is None
    if not job.checks or not job.row.moves or nothing or not backend.verifies:
        return Half(times, None)
    phase(f"verification {where}")
    total, first = 0, Check()
    for number in range(job.checks):
        found = verify(backend, op, job.number, pattern, seed + number)
        if found.wrong and not total:
            first = found
        total += found.wrong
    return Half(times, Check(total, first.index, first.got, first.expected))


def measure(
    backend: Backend | None,
    job: Job,
    buffers: tuple[Buffer, Buffer],
    *,
    control: Backend | None = None,
    group_size: int | None = None,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
    phase: Callable[[str], None] = lambda name: None,
) -> Result:
    """Collective: every rank calls it with the same job and gets the same result.

    `buffers` have at least `buffer_counts` elements.  `stop` says whether this rank wants to end
    the sweep; the answer is shared, so all ranks end at the same size.  The reported time is the
    median over the iterations of the maximum over the ranks.

    `control` is the world, where `backend` is a group of it: then all groups run at the same time,
    ranks in results are the world's, and a rank in no group has the back end None and says with
    `group_size` how many ranks a group has.
    """
    everyone = control or backend
    assert everyone is not None
    n = backend.world_size if backend is not None else group_size or 1
    shape: Shape = job.row.shape(job.size, job.number.size, n)
    size = shape.total * job.number.size
    spread = _one_placement(backend, everyone, job, buffers, False, seed, phase)
    inside = _one_placement(backend, everyone, job, buffers, True, seed + job.checks, phase)
    phase("gathering results")
    # With --precision the two may have different numbers of iterations.
    outer = [unpack(values) for values in everyone.gather(spread.pack())]
    rows = everyone.gather([float(stop()), *inside.pack()])
    factor = job.row.busbw_factor(n)
    return Result(
        count=shape.part,
        bytes=size,
        out_of_place=placement(outer, False, size, factor),
        in_place=placement([unpack(values[1:]) for values in rows], True, size, factor),
        stop=any(values[0] for values in rows),
        root=job.root if job.row.rooted else -1,
    )
