"""The groups that one rank is to create: which, under which names, and in which waves.

A plan holds this rank's part only, so it costs what the rank's own groups have in ranks; what all
ranks must agree on is the layout's digest.
"""

from __future__ import annotations

import hashlib
import operator
import struct
import threading
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

from commkit.errors import LayoutError
from commkit.layout import Layout

__all__ = ["Generations", "Group", "GroupPlan", "group_name", "make"]

_WORD = 24  # characters of the family's name in a group's


@dataclass(frozen=True, slots=True)
class Group:
    """One group that this rank is to create."""

    family: str
    ranks: tuple[int, ...]  # in the layout's order
    name: str
    index: int  # of this rank in `ranks`


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What one rank is to create.

    `groups` are in canonical order: the layout's families, the waves of each, then the order of
    the family.  `waves[k]` are indices into `groups` of what belongs to the world's wave k, () if
    nothing does: groups of a wave have no rank in common, and every rank has as many waves in the
    same order.  So ranks that create wave after wave, one group at a time, never wait in a circle.
    `digest` and `description` (its summary()) are those of the whole layout.
    """

    rank: int
    world_size: int
    groups: tuple[Group, ...]
    waves: tuple[tuple[int, ...], ...]
    digest: bytes
    description: str


def _identity(family: str, ranks: Sequence[int]) -> bytes:
    """12 bytes that stand for a family's name and an ordered list of ranks."""
    word = family.encode("utf-8", "surrogatepass")
    packed = struct.pack(f"<Q{len(word)}sQ{len(ranks)}q", len(word), word, len(ranks), *ranks)
    return hashlib.sha256(b"commkit group 1" + packed).digest()[:12]


def _name(family: str, identity: bytes, generation: int) -> str:
    word = urllib.parse.quote(family, safe="", errors="surrogatepass")[:_WORD]
    return f"ck:{word}:{identity.hex()}:{generation}"


def group_name(family: str, ranks: Sequence[int], generation: int) -> str:
    """`ck:tp:<24 hex digits>:0`: at most 64 characters of A-Z a-z 0-9 : % . _ ~ and -.

    Equal on all members, whatever else they did, and for every Python hash seed; different for
    another family, other ranks, another order of them, or another generation.
    """
    if not 0 <= generation < 10**10:
        raise LayoutError(f"generation {generation}: expected 0 to 9,999,999,999")
    return _name(family, _identity(family, ranks), generation)


class Generations:
    """How often this process has used each list of ranks under each family.  Thread-safe.

    Every member of a group has used it as often as the others, so the count is the same on all of
    them; a count of all groups of a process would not be.
    """

    def __init__(self) -> None:
        self._used: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def next(self, family: str, ranks: Sequence[int]) -> int:
        """0 at the first call with these arguments, then 1, 2, ..."""
        return self._next(_identity(family, ranks))

    def _next(self, identity: bytes) -> int:
        with self._lock:
            generation = self._used.get(identity, 0)
            self._used[identity] = generation + 1
        return generation

    def named(self, family: str, ranks: Sequence[int]) -> str:
        """group_name() with the next generation."""
        identity = _identity(family, ranks)
        return _name(family, identity, self._next(identity))


def make(layout: Layout, rank: int, generations: Generations) -> GroupPlan:
    """The plan of `rank`; counts every group in it as used.

    Raises LayoutError if the world has no such rank.
    """
    rank = operator.index(rank)
    if not 0 <= rank < layout.world_size:
        raise LayoutError(f"rank {rank} is outside a world of {layout.world_size}")
    groups: list[Group] = []
    waves: list[tuple[int, ...]] = []
    for name, family in layout.families.items():
        own: list[list[int]] = [[] for _ in range(family.waves)]
        for wave, ranks in family.part(rank):
            own[wave].append(len(groups))
            groups.append(Group(name, ranks, generations.named(name, ranks), ranks.index(rank)))
        waves += map(tuple, own)
    return GroupPlan(
        rank, layout.world_size, tuple(groups), tuple(waves), layout.digest(), layout.summary()
    )
