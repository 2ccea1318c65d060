"""Families of groups: all groups of one purpose ("tp", "dp", ...), made from a grid or from lists.

A grid's family is arithmetic: what one rank asks for costs what its own groups have in ranks, and
what the family is costs a few numbers, however large the world.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from commkit.errors import LayoutError, UsageError
from commkit.ranks import Steps, brief, check_ranks, merged, runs, shown, shown_steps, steps_of


class Family:
    """All groups of one purpose.  Two families with the same groups describe() themselves alike.

    name      "tp", "dp-cp", "embd", a DeviceMesh dimension, or the caller's word
    count     number of groups in the world
    sizes     (smallest, largest) group, in ranks
    disjoint  no rank is in two of the groups
    waves     number of waves, 1 if disjoint: the groups of one wave have no rank in common
    """

    name: str
    world_size: int
    count: int
    sizes: tuple[int, int]
    disjoint: bool
    waves: int

    def of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The groups that contain `rank`, in canonical order; () if there are none."""
        return tuple(ranks for _, ranks in self.part(rank))

    def part(self, rank: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(wave, ranks) of each group that contains `rank`, in canonical order: by wave."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """All groups, one after the other, in canonical order."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.count

    def describe(self) -> str:
        """Canonical text, equal if and only if the groups, their order and their ranks' are.

        `2x1 from 4x2`: two neighbouring ranks, from each of 0, 2, 4, 6.  Groups that are not all
        of one shape are listed.
        """
        return self._description

    @functools.cached_property
    def _description(self) -> str:
        raise NotImplementedError

    def _checked(self, rank: int) -> int:
        rank = operator.index(rank)  # an integer of numpy must not get into the groups
        if not 0 <= rank < self.world_size:
            raise UsageError(
                f"family {self.name!r}: rank {rank} is outside a world of {self.world_size}"
            )
        return rank

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self.describe()}>"


class GridFamily(Family):
    """The groups along some dimensions of a grid.

    `inner` and `outer` are (size, stride) of the dimensions inside and outside a group, fastest
    first; together they are all of the grid, which covers the ranks from 0.  The positions 0 ...
    n - 1 inside may be narrowed: `pick` keeps some of them (embedding groups), `split` = (s, u)
    cuts them into groups of s positions that are u apart.
    """

    def __init__(
        self,
        name: str,
        world_size: int,
        inner: Iterable[tuple[int, int]],
        outer: Iterable[tuple[int, int]],
        *,
        pick: Sequence[int] | None = None,
        split: tuple[int, int] | None = None,
    ) -> None:
        self.name = name
        self.world_size = world_size
        self.inner = tuple(inner)
        self.outer = tuple(outer)
        self._positions = math.prod(size for size, _ in self.inner)
        self._pick = None if pick is None else tuple(sorted(set(pick)))
        self._split = split if split is not None else (self._positions, 1)
        bases = math.prod(size for size, _ in self.outer)
        self.covered = bases * self._positions
        self.count = bases * (self._positions // self._split[0])
        size = self._split[0] if self._pick is None else len(self._pick)
        self.sizes = (size, size)
        self.disjoint = True
        self.waves = 1

    def _offset(self, position: int) -> int:
        offset = 0
        for size, stride in self.inner:
            offset += position % size * stride
            position //= size
        return offset

    def _members(self, base: int, position: int) -> tuple[int, ...]:
        """The group of the rank at `position` of the ranks that begin with `base`."""
        if self._pick is not None:
            return tuple(base + self._offset(p) for p in self._pick)
        size, apart = self._split
        if size == self._positions:
            members = [base]
            for count, stride in self.inner:
                members = [m + i * stride for i in range(count) for m in members]
            return tuple(members)
        first = position - position % (size * apart) + position % apart
        return tuple(base + self._offset(first + i * apart) for i in range(size))

    def part(self, rank: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        rank = self._checked(rank)
        if rank >= self.covered:
            return ()
        base, position, factor = rank, 0, 1
        for size, stride in self.inner:
            index = rank // stride % size
            base -= index * stride
            position += index * factor
            factor *= size
        if self._pick is not None and position not in self._pick:
            return ()
        return ((0, self._members(base, position)),)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        size, apart = self._split
        for base in self._bases():
            for first in range(0, self._positions, size * apart):
                for shift in range(apart):
                    yield self._members(base, first + shift)

    def _bases(self) -> Iterator[int]:
        # product() varies its last factor fastest.
        ranges = [range(0, size * stride, stride) for size, stride in reversed(self.outer)]
        return map(sum, itertools.product(*ranges))

    @functools.cached_property
    def _description(self) -> str:
        size, apart = self._split
        within: Steps | None
        starts: Steps | None
        if self._pick is not None:
            offsets = [self._offset(p) for p in self._pick]
            within = steps_of([offset - offsets[0] for offset in offsets])
            starts = merged(self.outer)
            if offsets[0] == 0 and within is not None:
                return _regular(within, starts, 0)
            return _listed(iter(self))
        if size == self._positions:
            return _regular(merged(self.inner), merged(self.outer), 0)
        first = self._members(0, 0)
        within = steps_of(first)
        firsts = [
            self._offset(first + shift)
            for first in range(0, self._positions, size * apart)
            for shift in range(apart)
        ]
        starts = steps_of(firsts)
        if within is None or starts is None or not self._uniform(firsts, first):
            return _text(list(self))
        return _regular(within, merged((*starts, *self.outer)), 0)

    def _uniform(self, firsts: Sequence[int], first: tuple[int, ...]) -> bool:
        """Whether every group of a base has the shape of the first one."""
        size, apart = self._split
        if len(firsts) * size != self._positions:
            return False
        starts = (
            start + shift
            for start in range(0, self._positions, size * apart)
            for shift in range(apart)
        )
        return all(
            self._members(0, start) == tuple(begin + offset for offset in first)
            for start, begin in zip(starts, firsts, strict=True)
        )


class ListFamily(Family):
    """Groups given rank by rank; sizes may differ, a rank's groups may be several (`overlap`)."""

    def __init__(
        self, name: str, world_size: int, groups: Iterable[Any], *, overlap: bool = False
    ) -> None:
        self.name = name
        self.world_size = world_size
        given = [
            check_ranks(ranks, world_size, f"family {name!r}, group {index}")
            for index, ranks in enumerate(_listable(name, groups))
        ]
        if not given:
            raise LayoutError(
                f"family {name!r} has no groups; leave the family out, or give it at least one"
            )
        # First fit: a group goes into the first wave in which none of its ranks has another.  By
        # the order of the list alone, [0,1] [1,2] [2,3] ... would be one long chain of waits.
        used: dict[int, int] = {}  # rank -> the waves it is in, as bits
        placed: list[tuple[int, int]] = []
        for index, ranks in enumerate(given):
            taken = 0
            for rank in ranks:
                taken |= used.get(rank, 0)
            if taken and not overlap:
                rank = next(rank for rank in ranks if rank in used)
                other = next(group for group in given if rank in group)
                raise LayoutError(
                    f"family {name!r}: rank {rank} is in {brief(other)} and in {brief(ranks)}; "
                    "groups of a family have no rank in common unless overlap names the family"
                )
            wave = (~taken & (taken + 1)).bit_length() - 1  # the lowest bit that is not set
            for rank in ranks:
                used[rank] = used.get(rank, 0) | 1 << wave
            placed.append((wave, index))
        placed.sort()
        self._groups = tuple((wave, given[index]) for wave, index in placed)
        self._first: dict[int, int] = {}
        self._more: dict[int, list[int]] = {}  # of ranks that are in several groups
        for number, (_, ranks) in enumerate(self._groups):
            for rank in ranks:
                if self._first.setdefault(rank, number) != number:
                    self._more.setdefault(rank, []).append(number)
        self.count = len(given)
        self.sizes = (min(map(len, given)), max(map(len, given)))
        self.waves = self._groups[-1][0] + 1
        self.disjoint = self.waves == 1

    def part(self, rank: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        rank = self._checked(rank)
        if rank not in self._first:
            return ()
        numbers = (self._first[rank], *self._more.get(rank, ()))
        return tuple(self._groups[number] for number in numbers)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (ranks for _, ranks in self._groups)

    @functools.cached_property
    def _description(self) -> str:
        return _text([ranks for _, ranks in self._groups])


def _listable(name: str, groups: Any) -> Iterable[Any]:
    if isinstance(groups, str | bytes | dict) or not isinstance(groups, Iterable):
        raise LayoutError(
            f"family {name!r}: {shown(groups)} is no list of groups, such as [[0, 1], [2]]"
        )
    return groups


def _regular(within: Steps, starts: Steps, first: int) -> str:
    begin = f"{first}+" if first else ""
    return f"{shown_steps(within)} from {begin}{shown_steps(starts)}"


def _text(groups: Sequence[tuple[int, ...]]) -> str:
    head = groups[0]
    within = steps_of(head)
    starts = steps_of([ranks[0] for ranks in groups])
    if within is not None and starts is not None:
        offsets = [rank - head[0] for rank in head]
        if all(
            len(ranks) == len(head)
            and all(r - ranks[0] == offset for r, offset in zip(ranks, offsets, strict=True))
            for ranks in groups
        ):
            return _regular(within, starts, head[0])
    return _listed(groups)


def _listed(groups: Iterable[tuple[int, ...]]) -> str:
    return ";".join(runs(ranks) for ranks in groups)
