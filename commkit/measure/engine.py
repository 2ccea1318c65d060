"""One size of one collective: warm-up, timing, verification, and one gather of what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from commkit.measure import statistics
from commkit.measure.backend import Backend, Buffer
from commkit.measure.collectives import Collective
from commkit.measure.numbers import Number
from commkit.measure.patterns import pattern_for
from commkit.measure.verify import Check, verify
from commkit.records import WrongElement

_NOT_VERIFIED = -1


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure.  `size` in bytes is rounded down to whole elements."""

    row: Collective
    number: Number
    redop: str
    size: int
    iterations: int
    warmup: int
    checks: int  # verification passes; 0: none


@dataclass(frozen=True, slots=True)
class Placement:
    """Results out of place or in place, over all ranks; times in seconds."""

    in_place: bool
    times: tuple[float, ...]  # each iteration's maximum over the ranks
    summary: statistics.Summary
    slowest_rank: int
    slowest_time: float
    algbw: float  # 1e9 bytes a second
    busbw: float | None
    wrong: int | None
    first_wrong: WrongElement | None


@dataclass(frozen=True, slots=True)
class Result:
    count: int
    bytes: int
    out_of_place: Placement
    in_place: Placement
    stop: bool  # a rank asked to stop after this size


@dataclass(frozen=True, slots=True)
class _Half:
    """One rank's row for one placement; travels as plain numbers."""

    times: list[float]
    check: Check | None

    def pack(self) -> list[float]:
        check = self.check or Check(wrong=_NOT_VERIFIED)
        return [*self.times, check.wrong, check.index, check.got, check.expected]


def _unpack(values: Sequence[float]) -> _Half:
    *times, wrong, index, got, expected = values
    if wrong == _NOT_VERIFIED:
        return _Half(times, None)
    return _Half(times, Check(int(wrong), int(index), got, expected))


def _plain(value: float) -> float | str:
    return value if value - value == 0 else str(value)


def _placement(halves: Sequence[_Half], in_place: bool, size: int, factor: float) -> Placement:
    times = statistics.slowest_over_ranks([half.times for half in halves])
    summary = statistics.summarize(times)
    rank, median = statistics.slowest_rank([half.times for half in halves])
    checks = [half.check for half in halves if half.check is not None]
    first = None
    for bad_rank, half in enumerate(halves):
        if half.check is not None and half.check.wrong:
            check = half.check
            first = WrongElement(bad_rank, check.index, _plain(check.got), check.expected)
            break
    algbw = statistics.algbw(size, summary.p50)
    return Placement(
        in_place=in_place,
        times=times,
        summary=summary,
        slowest_rank=rank,
        slowest_time=median,
        algbw=algbw,
        busbw=algbw * factor if factor else None,
        wrong=sum(check.wrong for check in checks) if checks else None,
        first_wrong=first,
    )


def _one_placement(
    backend: Backend,
    job: Job,
    send: Buffer,
    receive: Buffer,
    seed: int,
    phase: Callable[[str], None],
) -> _Half:
    where = "in place" if send is receive else "out of place"

    def call() -> None:
        job.row.run(backend, send, receive, job.redop)

    phase(f"warm-up {where}")
    for buffer in (send, receive):
        buffer.zero_()
    for _ in range(job.warmup):
        call()
    backend.synchronize()
    # Ranks leave the last size at different times; the first iteration is not to pay for that.
    backend.barrier()
    phase(f"timing {where}")
    times = backend.time(call, job.iterations)
    pattern = pattern_for(job.number, job.redop, backend.world_size)
    if not job.checks or pattern is None:
        return _Half(times, None)
    phase(f"verification {where}")
    total, first = 0, Check()
    for number in range(job.checks):
        found = verify(backend, job.row, send, receive, job.redop, pattern, seed + number)
        if found.wrong and not total:
            first = found
        total += found.wrong
    return _Half(times, Check(total, first.index, first.got, first.expected))


def measure(
    backend: Backend,
    job: Job,
    send: Buffer,
    receive: Buffer,
    *,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
    phase: Callable[[str], None] = lambda name: None,
) -> Result:
    """Collective: every rank calls it with the same job and gets the same result.

    `send` and `receive` have at least the job's count of elements.  `stop` says whether this
    rank wants to end the sweep; the answer is shared, so all ranks end at the same size.  The
    reported time is the median over the iterations of the maximum over the ranks.
    """
    count = job.row.count(job.size, job.number.size, backend.world_size)
    size = count * job.number.size
    send, receive = send[:count], receive[:count]
    spread = _one_placement(backend, job, send, receive, seed, phase)
    inside = _one_placement(backend, job, receive, receive, seed + job.checks, phase)
    phase("gathering results")
    rows = backend.gather([float(stop()), *spread.pack(), *inside.pack()])
    factor = job.row.busbw_factor(backend.world_size)
    half = (len(rows[0]) - 1) // 2
    outer = [_unpack(values[1 : 1 + half]) for values in rows]
    inner = [_unpack(values[1 + half :]) for values in rows]
    return Result(
        count=count,
        bytes=size,
        out_of_place=_placement(outer, False, size, factor),
        in_place=_placement(inner, True, size, factor),
        stop=any(values[0] for values in rows),
    )
