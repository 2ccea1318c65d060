"""Lists of ranks: normalising what callers give, and writing them down briefly and canonically."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from commkit.errors import LayoutError, LayoutTypeError

#: Arithmetic progressions inside one another, innermost first: (count, step).
Steps = tuple[tuple[int, int], ...]


def check_ranks(ranks: Any, world_size: int, what: str = "ranks") -> tuple[int, ...]:
    """`ranks` as a tuple of ints, in the caller's order.

    Takes what callers of torch use: sequences, ranges, iterators, one-dimensional tensors and
    arrays, and elements that are integers of numpy or torch; a set is sorted, since it has no
    order; None stands for all ranks.  Raises LayoutTypeError (a TypeError) for strings, mappings,
    truth values and anything that is no integer, LayoutError (a ValueError) for an empty list, a
    rank outside 0 ... world_size - 1, and one that is given twice.  `what` begins the message.
    """
    if ranks is None:
        return tuple(range(world_size))
    if isinstance(ranks, range):
        # One that is too long is not made first: its ends are outside the world.
        result = tuple(ranks if len(ranks) <= world_size else (ranks[0], ranks[-1]))
    else:
        result = tuple(_integer(rank, what) for rank in _elements(ranks, what))
        if isinstance(ranks, set | frozenset):
            result = tuple(sorted(result))
    if not result:
        raise LayoutError(f"{what}: no rank in it; a group has at least one, None means all ranks")
    for rank in (min(result), max(result)):
        if not 0 <= rank < world_size:
            raise LayoutError(
                f"{what}: rank {rank} is outside a world of {world_size}: expected 0 to "
                f"{world_size - 1} in {brief(result)}"
            )
    if len(set(result)) != len(result):
        ordered = sorted(result)
        twice = next(a for a, b in itertools.pairwise(ordered) if a == b)
        raise LayoutError(f"{what}: rank {twice} is there more than once in {brief(result)}")
    return result


def _elements(ranks: Any, what: str) -> Iterable[Any]:
    if hasattr(ranks, "tolist"):  # of tensors and arrays: their own elements would be tensors
        ranks = ranks.tolist()
    if isinstance(ranks, str | bytes | bytearray | Mapping) or not isinstance(ranks, Iterable):
        raise LayoutTypeError(
            f"{what}: {shown(ranks)} ({type(ranks).__name__}) is no list of ranks: expected "
            "integers, such as [0, 1]"
        )
    return ranks


def _integer(rank: Any, what: str) -> int:
    try:
        # Of numpy's and torch's scalars their own: a truth value is an index, too.
        value = rank.tolist() if hasattr(rank, "tolist") else rank
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise LayoutTypeError(
            f"{what}: {shown(rank)} ({type(rank).__name__}) is no rank: expected an integer"
        ) from None


def shown(value: object, width: int = 60) -> str:
    """`value` for a message: one line, shortened."""
    text = " ".join(repr(value).split())
    return text if len(text) <= width else text[: width - 3] + "..."


def brief(ranks: Sequence[int], width: int = 60) -> str:
    """`[0-7,16]` for a message: runs of consecutive ranks, shortened to `width` characters."""
    text = "[" + runs(ranks) + "]"
    if len(text) <= width:
        return text
    return text[: width - 4].rpartition(",")[0] + ",...]"


def runs(ranks: Sequence[int]) -> str:
    """`0-2,8,6-4`: the ranks in their order, runs of neighbours drawn together."""
    parts: list[str] = []
    start = 0
    while start < len(ranks):
        end = start + 1
        step = ranks[end] - ranks[start] if end < len(ranks) else 0
        if abs(step) == 1:
            while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
                end += 1
        parts.append(str(ranks[start]) if end == start + 1 else f"{ranks[start]}-{ranks[end - 1]}")
        start = end
    return ",".join(parts)


def steps_of(values: Sequence[int]) -> Steps | None:
    """`values` as progressions inside one another, or None if they are none.

    Canonical: the innermost progression is as long as it can be, so that a regular sequence has
    one form however it was made: 0 1 8 9 -> ((2, 1), (2, 8)), 0 1 2 3 -> ((4, 1),).
    """
    found: list[tuple[int, int]] = []
    while len(values) > 1:
        step = values[1] - values[0]
        count = 2
        while count < len(values) and values[count] - values[count - 1] == step:
            count += 1
        if len(values) % count:
            return None
        for start in range(0, len(values), count):
            for index in range(start + 1, start + count):
                if values[index] - values[index - 1] != step:
                    return None
        found.append((count, step))
        values = values[::count]
    return tuple(found)


def merged(steps: Iterable[tuple[int, int]]) -> Steps:
    """The canonical form (that of steps_of) of progressions given innermost first."""
    found: list[tuple[int, int]] = []
    for count, step in steps:
        if count == 1:
            continue
        if found and step == found[-1][0] * found[-1][1]:
            found[-1] = (found[-1][0] * count, found[-1][1])
        else:
            found.append((count, step))
    return tuple(found)


def shown_steps(steps: Steps) -> str:
    """`2x1,4x16`: two ranks side by side, four times, sixteen apart; `1` for a single one."""
    return ",".join(f"{count}x{step}" for count, step in steps) or "1"
