"""All shapes of a world."""

from __future__ import annotations


def factorings(number, count):
    """All ordered ways to write `number` as a product of `count` factors."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in factorings(number // first, count - 1):
                yield (first, *rest)
