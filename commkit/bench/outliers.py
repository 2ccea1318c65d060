"""Which values of a matrix are unlike the others, and whose they are."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

Pair = tuple[int, int]

#: A value is far from the median if it is this many robust standard deviations away ...
DEVIATIONS = 3.5
#: ... and by this share of it: on a quiet machine the deviations alone are tiny.
SHARE = 0.25
#: 1 / the 75 % quantile of the normal distribution: median absolute deviation -> deviation.
_NORMAL = 1.4826


@dataclass(frozen=True, slots=True)
class Outlier:
    pair: Pair
    value: float
    median: float


def outliers(values: Mapping[Pair, float], *, low_is_bad: bool) -> list[Outlier]:
    """The pairs that are worse than the others, worst first; few pairs have no outliers."""
    if len(values) < 4:
        return []
    middle = statistics.median(values.values())
    spread = _NORMAL * statistics.median(abs(value - middle) for value in values.values())
    bound = max(DEVIATIONS * spread, SHARE * middle)
    found = [
        Outlier(pair, value, middle)
        for pair, value in values.items()
        if (middle - value if low_is_bad else value - middle) > bound
    ]
    return sorted(found, key=lambda one: one.value, reverse=not low_is_bad)


def common(found: list[Outlier], values: Mapping[Pair, float]) -> list[tuple[int, int, int]]:
    """(member, its outliers, its pairs) of those that half of their pairs are outliers of."""
    bad = Counter(member for one in found for member in one.pair)
    pairs = Counter(member for pair in values for member in pair)
    return sorted(
        (
            (member, count, pairs[member])
            for member, count in bad.items()
            if count >= 2 and 2 * count > pairs[member]
        ),
        key=lambda item: -item[1],
    )
