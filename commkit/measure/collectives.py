"""Collectives as rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commkit.measure.backend import Backend, Buffer


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective.

    count           (bytes asked for, element size, world size) -> elements a rank sends
    busbw_factor    world size -> busbw / algbw; 0 for one rank, where busbw is not defined.
                    Source: nccl-tests' doc/PERFORMANCE.md
    run             (back end, send buffer, receive buffer, reduction) -> None; in place where
                    both buffers are the same object
    copies          how the torch back end gets an out-of-place version, for the header
    """

    name: str
    reduces: bool
    rooted: bool
    count: Callable[[int, int, int], int]
    busbw_factor: Callable[[int], float]
    run: Callable[[Backend, Buffer, Buffer, str], None]
    copies: str


#: An all-reduce moves each byte twice over a bus but for the rank's own share: 2 (n-1) / n.
#: In-network reduction moves less; its own factor would be another column, not another busbw.
ALL_REDUCE = Collective(
    name="all_reduce",
    reduces=True,
    rooted=False,
    count=lambda size, element, n: size // element,
    busbw_factor=lambda n: 2 * (n - 1) / n,
    run=lambda backend, send, receive, redop: backend.all_reduce(send, receive, redop),
    copies="torch reduces in place: out-of-place time includes one copy of the buffer",
)

COLLECTIVES: dict[str, Collective] = {row.name: row for row in (ALL_REDUCE,)}
