"""Logarithmic scales, their ticks and labels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_name(size: float) -> str:
    """1536 -> `1.5 KiB`."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.4g} {_UNITS[unit]}"


def number_name(value: float) -> str:
    """At most three digits, with a metric prefix above 999: 12000 -> `12k`."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{prefix}"
    return f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Scale:
    """Logarithmic, from `low` to `high`, onto `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def place(self, value: float) -> float:
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.begin + share * (self.end - self.begin)

    def ticks(self, base: int, most: int = 8) -> list[float]:
        """Powers of `base` inside, thinned to `most`; for decades 2 and 5 too, where few."""
        first = math.ceil(math.log(self.low, base) - 1e-9)
        last = math.floor(math.log(self.high, base) + 1e-9)
        powers = list(range(first, last + 1))
        step = max(1, math.ceil(len(powers) / most))
        found = [float(base) ** power for power in powers[::step]]
        if base == 10 and len(found) < 3:
            found = [
                times * 10.0**power
                for power in range(first - 1, last + 2)
                for times in (1, 2, 5)
                if self.low <= times * 10.0**power <= self.high
            ]
        return found


def around(values: Iterable[float], begin: float, end: float) -> Scale:
    """With room at both ends; a single value stands in the middle."""
    found = list(values)
    low, high = min(found), max(found)
    room = max((high / low) ** 0.04, 1.05) if high > 1.01 * low else 2.0
    return Scale(low / room, high * room, begin, end)
