"""The groups that a sweep runs in: the world, a layout's families, or the world split by a rule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from commkit import layout as layouts
from commkit.bench.agreement import Hello
from commkit.errors import UsageError
from commkit.measure.backend import Backend

#: What --groups takes besides /N and %N.
RULES = ("split-by-host", "rail")


@dataclass(frozen=True, slots=True)
class Team:
    """All groups of one family, which run at the same time.

    `backend` is this rank's group, None if it is in none; `size` is the ranks of a group.
    """

    label: str
    backend: Backend | None
    size: int
    groups: tuple[tuple[int, ...], ...]

    def hosts(self, hellos: Sequence[Hello]) -> tuple[str, ...]:
        """The hosts of the first group's ranks, in group order."""
        return tuple(hellos[rank].host for rank in self.groups[0])


def world(backend: Backend) -> Team:
    return Team("", backend, backend.world_size, (tuple(range(backend.world_size)),))


def family(text: str, name: str, world_size: int) -> tuple[tuple[int, ...], ...]:
    """The groups of a layout's family.  Raises UsageError and LayoutError."""
    layout = layouts.parse(text, world_size)
    if name not in layout.families:
        raise UsageError(
            f"--layout {text} has no family {name!r}; it has {', '.join(layout.families)}"
        )
    return alike(tuple(tuple(group) for group in layout.families[name]), name)


def split(rule: str, hellos: Sequence[Hello]) -> tuple[tuple[int, ...], ...]:
    """The groups of a rule; raises UsageError for an unknown one and for unequal sizes.

    split-by-host: the ranks of a host; rail: the ranks of equal place on their hosts; /N: N ranks
    in a row; %N: every N-th rank.
    """
    found: dict[object, list[int]] = {}
    places: dict[str, int] = {}
    number = re.fullmatch(r"([/%])([1-9][0-9]{0,5})", rule)
    if number is None and rule not in RULES:
        raise UsageError(f"--groups {rule}: expected {', '.join(RULES)}, /N or %N")
    for rank, hello in enumerate(hellos):
        key: object
        if number is not None:
            n = int(number[2])
            key = rank // n if number[1] == "/" else rank % n
        elif rule == "rail":
            key = places.get(hello.host, 0)
            places[hello.host] = places.get(hello.host, 0) + 1
        else:
            key = hello.host
        found.setdefault(key, []).append(rank)
    return alike(tuple(tuple(ranks) for ranks in found.values()), rule)


def alike(groups: tuple[tuple[int, ...], ...], what: str) -> tuple[tuple[int, ...], ...]:
    sizes = sorted({len(group) for group in groups})
    if len(sizes) != 1:
        raise UsageError(
            f"{what}: groups of {sizes[0]} and of {sizes[-1]} ranks: expected groups of one size, "
            "since bandwidth depends on it; start as many ranks on each host"
        )
    return groups
