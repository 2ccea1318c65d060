"""Test data for reductions: the result is exact in whatever order the ranks are combined.

A reduction of arbitrary floats depends on the order, so a checker needs a tolerance, and a
tolerance lets errors pass.  Here element i of rank r is made of a slot and a scale:

    slot  = (hash(i) + r) mod world size        every slot belongs to exactly one rank
    scale = 1 + another hash(i) mod `scales`
    value = weights[slot] * scale               (sum, avg)
            2**weights[slot], slot 0 * scale    (prod)
            weights[slot] + scale               (min, max)

The weights are small enough for every partial result to be representable: f8e5m2 counts to 8
without a gap, so at most a few ranks contribute to any one element, other ranks to the next.
The expected value follows from `scale` alone, without a loop over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from commkit.measure.numbers import Number


@dataclass(frozen=True, slots=True)
class Pattern:
    """What to fill and what to expect.

    `combined` is the reduction of all weights.  A result may differ from the expected value by
    `tolerance` times it: 0 (bit for bit) but for avg over a world size that is no power of two,
    where 1/n itself is rounded and the standard bound for that many roundings is used.
    """

    redop: str
    floating: bool
    world_size: int
    weights: tuple[int, ...]
    scales: int
    combined: int
    tolerance: float = 0.0

    def value(self, slot: int, scale: int) -> int:
        """The element of the rank that owns `slot`."""
        weight = self.weights[slot]
        if self.redop == "prod":
            return (1 << weight) * (scale if slot == 0 else 1)
        if self.redop in ("min", "max"):
            return weight + scale
        return weight * scale

    def expected(self, scale: int) -> float:
        """What the reduction delivers."""
        if self.redop == "prod":
            return 2.0**self.combined * scale
        if self.redop in ("min", "max"):
            return float(self.combined + scale)
        total = self.combined * scale
        if self.redop == "sum":
            return float(total)
        # Integer averages are the exact sum, divided once, rounded towards zero.
        return total / self.world_size if self.floating else float(total // self.world_size)


#: More scales would not see more, and `compare` keeps one expected value for each.
_SCALES = 1000


def _summed(number: Number, redop: str, weights: Sequence[int], tolerance: float = 0.0) -> Pattern:
    total = sum(weights)
    scales = min(number.exact // total, _SCALES)
    return Pattern(redop, number.floating, len(weights), tuple(weights), scales, total, tolerance)


def _spread(ones: int, slots: int) -> list[int]:
    """`ones` ones, evenly among `slots` places."""
    return [((i + 1) * ones) // slots - (i * ones) // slots for i in range(slots)]


def _summable(exact: int, world_size: int) -> Sequence[int]:
    """Weights whose total is at most half of `exact`, so that there are two scales at least."""
    # Neighbours differ, so that taking one rank twice and another not at all is seen.
    varied = [1 + slot % 3 for slot in range(world_size)]
    if sum(varied) <= exact // 2:
        return varied
    return _spread(min(world_size, max(1, exact // 4)), world_size)


def pattern_for(number: Number, redop: str, world_size: int) -> Pattern | None:
    """The pattern for a reduction, or None where the type leaves nothing to verify with.

    The latter is avg of a type whose smallest number is larger than 1/world_size.
    """
    n = world_size
    if redop == "sum" or (redop == "avg" and not number.floating):
        return _summed(number, redop, _summable(number.exact, n))
    if redop == "prod":
        weights = _spread(min(n, number.exponent), n)
        return Pattern(redop, number.floating, n, tuple(weights), 3, sum(weights))
    if redop in ("min", "max"):
        # One slot alone decides; which rank owns it changes from element to element.
        decisive = 2 if redop == "max" else 0
        scales = min(number.exact - 2, _SCALES)
        weights = [decisive] + [1] * (n - 1)
        return Pattern(redop, number.floating, n, tuple(weights), scales, decisive)
    if n > 2 ** min(number.smallest, 30):
        return None
    if n & (n - 1) == 0:
        return _summed(number, redop, _summable(number.exact, n))
    # Roundings: 1/n, each product, their sum, the result; adding a zero is exact.  Eight-bit
    # types have so few digits that one contributor is all that leaves a useful bound.
    contributors = 2 if number.roundoff <= 2**-8 else 1
    # (1 + u)**k - 1, which plain arithmetic would round to 0 for double; and the expected
    # value's own rounding.
    tolerance = math.expm1((3 + contributors) * math.log1p(number.roundoff)) + 2**-52
    return _summed(number, redop, _spread(contributors, n), tolerance)
