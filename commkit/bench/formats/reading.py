"""What a reader is given and gives, and one record from what another tool's file tells."""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from commkit.bench.formats.bandwidth import factor
from commkit.errors import UsageError
from commkit.records import Measurement


@dataclass(frozen=True, slots=True)
class Given:
    """Where a text comes from, and what its reader was told beside it."""

    name: str  # of the file, for errors
    changed: float = 0.0  # seconds since 1970, for formats without a date
    collective: str = ""
    ranks: int = 0  # 0: not told

    def wrong(self, line: int, text: str) -> UsageError:
        return UsageError(f"{self.name}:{line}: {text}")


@dataclass(slots=True)
class Reading:
    format: str
    records: list[Measurement]
    #: What a reader of the numbers should know: rows left out, errors that the tool reported.
    notes: list[str] = field(default_factory=list)
    #: Wrong elements and the average bus bandwidth, as each run of nccl-tests printed them.
    out_of_bounds: list[int] = field(default_factory=list)
    averages: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Spread:
    """Over iterations, in microseconds, as far as a file tells; cv is a ratio."""

    minimum: float | None = None
    mean: float | None = None
    p95: float | None = None
    p99: float | None = None
    maximum: float | None = None
    cv: float | None = None
    times: tuple[float, ...] = ()
    ranks: tuple[float, ...] = ()  # each rank's


_NUMBER = re.compile(r"(\d{1,18}(\.\d{0,18})?|\.\d{1,18})([eE][-+]?\d\d?)?", re.ASCII)
_SIZE = re.compile(r"\d{1,18}", re.ASCII)


def number(text: str) -> float:
    """Raises ValueError for anything but a finite number, not negative, as benchmarks print it."""
    if _NUMBER.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no number")
    return float(text)


def size(text: str) -> int:
    """Raises ValueError for anything but a number of bytes, elements or calls."""
    if _SIZE.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no size")
    return int(text)


def identifier(text: str, number: int = 0) -> str:
    """A run that is read twice has the same name."""
    return f"{hashlib.sha256(text.encode()).hexdigest()[:12]}-{number}"


def record(
    *,
    tool: str,
    collective: str,
    size: int,
    time_us: float,
    time_is: str,
    ranks: int,
    run: str,
    timestamp: float,
    dtype: str = "",
    redop: str = "none",
    root: int = -1,
    in_place: bool = False,
    count: int = 0,
    hosts: int = 0,
    groups: int = 1,
    backend: str = "",
    device: str = "",
    iterations: int = 0,
    warmup: int = 0,
    aggregated: int = 1,
    mode: str = "blocking",
    clock: str = "",
    spread: Spread | None = None,
    slowest: float | None = None,
    busbw: float | None = None,
    wrong: int | None = None,
    versions: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    source: int = -1,
    peer: int = -1,
) -> Measurement:
    """Bandwidths are computed from size and time, so that they have more digits than a table.

    `busbw` is the printed one, for a collective or a number of ranks that is not known.
    """
    if spread is None:
        spread = Spread()
    algbw = size / time_us / 1e3 if size > 0 and time_us > 0 else 0.0
    ratio = factor(collective, ranks)
    if ratio is not None:
        busbw = algbw * ratio
    elif ranks == 1:
        busbw = None
    slowest_rank = -1
    if spread.ranks:
        slowest_rank = max(range(len(spread.ranks)), key=spread.ranks.__getitem__)
        slowest = spread.ranks[slowest_rank]
    return Measurement(
        collective=collective,
        dtype=dtype,
        redop=redop,
        root=root,
        in_place=in_place,
        bytes=size,
        count=count,
        world_size=ranks,
        hosts=hosts,
        backend=backend,
        device=device,
        start=tool,
        iterations=iterations,
        warmup_iterations=warmup,
        clock=clock,
        times_us=spread.times,
        time_us=time_us,
        min_us=spread.minimum,
        mean_us=spread.mean,
        p95_us=spread.p95,
        p99_us=spread.p99,
        max_us=spread.maximum,
        cv=spread.cv,
        slowest_rank=slowest_rank,
        slowest_rank_time_us=slowest,
        algbw_gbps=algbw,
        busbw_gbps=busbw,
        wrong=wrong,
        first_wrong=None,
        run=run,
        timestamp=timestamp,
        versions=dict(versions or {}),
        environment=dict(environment or {}),
        mode=mode,
        aggregated=aggregated,
        groups=groups,
        source=source,
        peer=peer,
        rank_times_us=spread.ranks,
        skew=_skew(spread.ranks),
        tool=tool,
        time_is=time_is,
    )


def _skew(ranks: Sequence[float]) -> float:
    middle = statistics.median(ranks) if ranks else 0.0
    return (max(ranks) - min(ranks)) / middle if middle > 0 else 0.0
