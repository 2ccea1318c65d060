"""How sure the ratio of two medians is: a bootstrap over runs and, within them, iterations.

A run is one list of times.  Iterations of one run share its placement, clocks and neighbours, so
only several runs tell how much runs differ (Kalibera and Jones, Rigorous benchmarking in
reasonable time, 2013): with several on a side, whole runs are drawn first.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DRAWS = 2000
#: Different resampled lists that are kept for each length.
POOL = 4000


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of `after` over time of `before`; above 1: slower.  None: nothing to be sure from."""

    value: float
    low: float | None
    high: float | None


@functools.cache
def _places(n: int) -> tuple[tuple[int, int], ...]:
    """Where the two middle values of a resampled list of `n` lie in the sorted list, many times.

    The k-th smallest of n uniform numbers is Beta(k, n - k + 1); given it, the next one is the
    smallest of n - k in the rest.  (David and Nagaraja, Order Statistics, section 2.)  So no list
    is made, and what is drawn depends on n alone.
    """
    generator = random.Random(n)
    k = (n + 1) // 2
    found = []
    for _ in range(POOL if n > 1 else 1):
        place = generator.betavariate(k, n - k + 1) if n > 1 else 0.0
        below = above = min(int(place * n), n - 1)
        if n % 2 == 0:
            place += (1 - place) * generator.betavariate(1, n - k)
            above = min(int(place * n), n - 1)
        found.append((below, above))
    return tuple(found)


def medians(times: Sequence[float], generator: random.Random, count: int = DRAWS) -> list[float]:
    """Medians of `count` resampled lists."""
    ordered = sorted(times)
    chosen = generator.choices(_places(len(ordered)), k=count)
    return [(ordered[below] + ordered[above]) / 2 for below, above in chosen]


def ratio(
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> Ratio:
    """The ratio of the geometric means of the runs' medians, with its percentile interval.

    Each argument holds one list of positive times a run.  Without repeats on either side (a single
    time each) there is no interval.
    """
    value = typical(after) / typical(before)
    if all(sum(map(len, side)) == 1 for side in (before, after)):
        return Ratio(value, None, None)
    generator = random.Random(seed)
    drawn = sorted(
        second - first
        for first, second in zip(
            _resampled(before, generator), _resampled(after, generator), strict=True
        )
    )
    tail = (1 - confidence) / 2
    low, high = drawn[int(tail * DRAWS)], drawn[math.ceil((1 - tail) * DRAWS) - 1]
    return Ratio(value, math.exp(low), math.exp(high))


def typical(runs: Sequence[Sequence[float]]) -> float:
    """The geometric mean of the runs' medians."""
    return math.exp(math.fsum(math.log(statistics.median(run)) for run in runs) / len(runs))


def _resampled(runs: Sequence[Sequence[float]], generator: random.Random) -> list[float]:
    """DRAWS times: the mean logarithm of the medians of as many runs, drawn with replacement."""
    logs = [list(map(math.log, medians(run, generator))) for run in runs]
    if len(runs) == 1:
        return logs[0]
    sums = [0.0] * DRAWS
    for slot in range(len(runs)):
        # A run that is drawn twice takes another of its medians the second time.
        shift = slot * (DRAWS // len(runs))
        for place, chosen in enumerate(generator.choices(logs, k=DRAWS)):
            sums[place] += chosen[(place + shift) % DRAWS]
    return [total / len(runs) for total in sums]
