"""Per-iteration times -> median, percentiles, spread; time and size -> bandwidth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Of a list of times, in their unit; cv is the standard deviation over the mean."""

    minimum: float
    mean: float
    p50: float
    p95: float
    p99: float
    maximum: float
    cv: float


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Nearest rank: the smallest value that at least `percent` % of the values do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def summarize(times: Sequence[float]) -> Summary:
    """Raises ValueError for an empty list.

    The median is what stands for the list: on shared machines single iterations take a hundred
    times as long as the rest.
    """
    if not times:
        raise ValueError("no times to summarize")
    ordered = sorted(times)
    mean = statistics.fmean(ordered)
    return Summary(
        minimum=ordered[0],
        mean=mean,
        p50=statistics.median(ordered),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        maximum=ordered[-1],
        cv=statistics.pstdev(ordered, mean) / mean if mean > 0 else 0.0,
    )


def slowest_over_ranks(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Times by rank and iteration -> each iteration's maximum over the ranks."""
    return tuple(max(column) for column in zip(*rows, strict=True))


def slowest_rank(rows: Sequence[Sequence[float]]) -> tuple[int, float]:
    """The rank whose own median is largest, and that median."""
    medians = [statistics.median(row) for row in rows]
    rank = max(range(len(medians)), key=medians.__getitem__)
    return rank, medians[rank]


def algbw(size: int, seconds: float) -> float:
    """Size over time in 1e9 bytes a second; 0 for no bytes or no time, never nan or infinity."""
    return size / seconds / 1e9 if size > 0 and seconds > 0 else 0.0


def skew(medians: Sequence[float]) -> float:
    """(largest - smallest) / median of the ranks' own medians; 0 for one rank."""
    middle = statistics.median(medians)
    return (max(medians) - min(medians)) / middle if middle > 0 else 0.0


def median_interval(times: Sequence[float]) -> tuple[float, float] | None:
    """A 95 % interval of the median from order statistics, or None for fewer than 6 values.

    Distribution-free: the number of values below the true median is binomial(n, 1/2), so the
    interval runs from the k-th smallest to the k-th largest value with the largest k for which
    P(fewer than k) <= 2.5 %.  (Conover, Practical Nonparametric Statistics, section 3.2.)
    Neighbouring iterations that are correlated make it too narrow.
    """
    n = len(times)
    below, k = 0.0, 0
    log_half = n * math.log(0.5)
    while k < n // 2:
        log_choose = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        below += math.exp(log_choose + log_half)
        if below > 0.025:
            break
        k += 1
    if k == 0:
        return None
    ordered = sorted(times)
    return ordered[k - 1], ordered[n - k]


def precision(times: Sequence[float]) -> float | None:
    """Half of the median's 95 % interval over the median; None where there is no interval."""
    interval = median_interval(times)
    middle = statistics.median(times) if times else 0.0
    if interval is None or middle <= 0:
        return None
    return (interval[1] - interval[0]) / 2 / middle
