"""Collectives as rows of a table.

Sizes follow nccl-tests (src/*.cu): S is the total buffer where data are divided over the ranks
(all_gather, reduce_scatter, all_to_all, gather, scatter), and a rank's part is rounded down to 16
bytes; elsewhere S is what each rank sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commkit.errors import UsageError

if TYPE_CHECKING:
    from commkit.measure.backend import Backend
    from commkit.measure.operation import Operation

#: A segment's source where its elements are the reduction over all ranks.
REDUCED = -1
#: A rank's part is a multiple of this many bytes, as in nccl-tests: aligned for vector loads.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Elements: of a rank's send and receive buffer, of its part, and S as nccl-tests prints it."""

    send: int
    receive: int
    part: int  # the column `count`
    total: int  # times the element's size: the column `size`


@dataclass(frozen=True, slots=True)
class Segment:
    """Where a piece of a rank's receive buffer comes from."""

    start: int
    length: int
    source: int  # a rank of the group, or REDUCED
    offset: int  # in the source's send buffer


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective.

    shape           (bytes asked for, element size, ranks) -> Shape
    busbw_factor    ranks -> busbw / algbw; 0 where busbw is not defined, for one rank
    run             makes one call
    segments        (rank, ranks, shape, root) -> what its receive buffer holds afterwards
    inside          (rank, shape, root) -> offsets of send and receive in one buffer, for the
                    in-place version
    note            what a reader of the times has to know, for the header
    """

    name: str
    reduces: bool
    rooted: bool
    shape: Callable[[int, int, int], Shape]
    busbw_factor: Callable[[int], float]
    run: Callable[[Backend, Operation], None]
    segments: Callable[[int, int, Shape, int], Iterator[Segment]]
    inside: Callable[[int, Shape, int], tuple[int, int]] = lambda rank, shape, root: (0, 0)
    note: str = ""
    moves: bool = True  # False: nothing but synchronization

    def partner(self, rank: int, n: int) -> tuple[int, int] | None:
        """(rank sent to, rank received from) of the point-to-point rows; None: idle, or no such."""
        rule = _PARTNERS.get(self.name)
        return None if rule is None else rule(rank, n)


# -- sizes


def _whole(size: int, element: int, n: int) -> Shape:
    count = size // element
    return Shape(count, count, count, count)


def part_of(size: int, element: int, n: int) -> int:
    """A rank's part of `size` bytes, in elements, rounded down to ALIGNMENT bytes."""
    step = max(1, ALIGNMENT // element)
    return size // element // n // step * step


def _gathered(size: int, element: int, n: int) -> Shape:
    part = part_of(size, element, n)
    return Shape(part, part * n, part, part * n)


def _scattered(size: int, element: int, n: int) -> Shape:
    part = part_of(size, element, n)
    return Shape(part * n, part, part, part * n)


def _exchanged(size: int, element: int, n: int) -> Shape:
    part = part_of(size, element, n)
    return Shape(part * n, part * n, part, part * n)


def _nothing(size: int, element: int, n: int) -> Shape:
    return Shape(0, 0, 0, 0)


# -- bandwidth: doc/PERFORMANCE.md of nccl-tests derives these


def _twice(n: int) -> float:
    # Each byte crosses a bus twice but for the rank's own share.  In-network reduction moves
    # less; its own factor would be another column, not another busbw.
    return 2 * (n - 1) / n


def _others(n: int) -> float:
    return (n - 1) / n


def _once(n: int) -> float:
    return 1.0 if n > 1 else 0.0


# -- where received elements come from


def _reduced(rank: int, n: int, shape: Shape, root: int) -> Iterator[Segment]:
    yield Segment(0, shape.receive, REDUCED, 0)


def _reduced_at_root(rank: int, n: int, shape: Shape, root: int) -> Iterator[Segment]:
    if rank == root:
        yield Segment(0, shape.receive, REDUCED, 0)


def _own_part(rank: int, n: int, shape: Shape, root: int) -> Iterator[Segment]:
    yield Segment(0, shape.part, REDUCED, rank * shape.part)


def _everybodys(rank: int, n: int, shape: Shape, root: int) -> Iterator[Segment]:
    for source in range(n):
        yield Segment(source * shape.part, shape.part, source, 0)


def _everybodys_at_root(rank: int, n: int, shape: Shape, root: int) -> Iterator[Segment]:
    if rank == root:
        yield from _everybodys(rank, n, shape, root)


def _roots(rank: int, n: int, shape: Shape, root: int) -> Iterator[Segment]:
    yield Segment(0, shape.receive, root, 0)


def _roots_part(rank: int, n: int, shape: Shape, root: int) -> Iterator[Segment]:
    yield Segment(0, shape.part, root, rank * shape.part)


def _exchange(rank: int, n: int, shape: Shape, root: int) -> Iterator[Segment]:
    for source in range(n):
        yield Segment(source * shape.part, shape.part, source, rank * shape.part)


def uneven(rank: int, n: int, part: int) -> tuple[int, ...]:
    """How many elements `rank` sends to each rank in all_to_all_v; n * part in all.

    Destinations at an odd distance get half a part more, the next even one half a part less, so
    that every rank also receives n * part.
    """
    half = part // 2

    def at(distance: int) -> int:
        if distance == 0 or (distance == n - 1 and distance % 2):
            return part
        return part + half if distance % 2 else part - half

    return tuple(at((destination - rank) % n) for destination in range(n))


def _uneven_exchange(rank: int, n: int, shape: Shape, root: int) -> Iterator[Segment]:
    start = 0
    for source in range(n):
        sent = uneven(source, n, shape.part)
        yield Segment(start, sent[rank], source, sum(sent[:rank]))
        start += sent[rank]


def _ring(rank: int, n: int) -> tuple[int, int] | None:
    return ((rank + 1) % n, (rank - 1) % n) if n > 1 else None


def _pairs(rank: int, n: int) -> tuple[int, int] | None:
    other = rank ^ 1
    return (other, other) if other < n else None


def _bisection(rank: int, n: int) -> tuple[int, int] | None:
    half = n // 2
    if rank >= 2 * half:
        return None
    other = rank + half if rank < half else rank - half
    return other, other


_PARTNERS = {"sendrecv": _ring, "sendrecv_pairs": _pairs, "sendrecv_bisection": _bisection}


def _from_partner(
    rule: Callable[[int, int], tuple[int, int] | None],
) -> Callable[[int, int, Shape, int], Iterator[Segment]]:
    def segments(rank: int, n: int, shape: Shape, root: int) -> Iterator[Segment]:
        partner = rule(rank, n)
        if partner is not None:
            yield Segment(0, shape.receive, partner[1], 0)

    return segments


def _no_segments(rank: int, n: int, shape: Shape, root: int) -> Iterator[Segment]:
    return iter(())


def _sendrecv(name: str, what: str) -> Collective:
    return Collective(
        name,
        False,
        False,
        _whole,
        _once,
        lambda backend, op: backend.exchange(op),
        _from_partner(_PARTNERS[name]),
        note=f"{what}; in place the message is sent from a copy, which the time includes",
    )


# -- the table

ALL_REDUCE = Collective(
    "all_reduce",
    True,
    False,
    _whole,
    _twice,
    lambda backend, op: backend.all_reduce(op.send, op.receive, op.redop),
    _reduced,
    note="torch reduces in place: out-of-place time includes one copy of the buffer",
)

_ROWS = (
    ALL_REDUCE,
    Collective(
        "all_gather",
        False,
        False,
        _gathered,
        _others,
        lambda backend, op: backend.all_gather(op),
        _everybodys,
        lambda rank, shape, root: (rank * shape.part, 0),
    ),
    Collective(
        "reduce_scatter",
        True,
        False,
        _scattered,
        _others,
        lambda backend, op: backend.reduce_scatter(op),
        _own_part,
        lambda rank, shape, root: (0, rank * shape.part),
    ),
    Collective(
        "all_to_all",
        False,
        False,
        _exchanged,
        _others,
        lambda backend, op: backend.all_to_all(op),
        _exchange,
        note="in place the data are sent from a copy where the library cannot, timed with it",
    ),
    Collective(
        "all_to_all_v",
        False,
        False,
        _exchanged,
        _others,
        lambda backend, op: backend.all_to_all_v(op),
        _uneven_exchange,
        note="uneven: parts of half, one and one and a half times the count; in place from a copy",
    ),
    Collective(
        "broadcast",
        False,
        True,
        _whole,
        _once,
        lambda backend, op: backend.broadcast(op),
        _roots,
        note="torch broadcasts in place: out-of-place time includes one copy on the root",
    ),
    Collective(
        "reduce",
        True,
        True,
        _whole,
        _once,
        lambda backend, op: backend.reduce(op),
        _reduced_at_root,
        note="torch reduces in place: out-of-place time includes one copy of the buffer",
    ),
    Collective(
        "gather",
        False,
        True,
        _gathered,
        _others,
        lambda backend, op: backend.gather_to(op),
        _everybodys_at_root,
        lambda rank, shape, root: (rank * shape.part, 0),
    ),
    Collective(
        "scatter",
        False,
        True,
        _scattered,
        _others,
        lambda backend, op: backend.scatter_from(op),
        _roots_part,
        lambda rank, shape, root: (0, rank * shape.part),
    ),
    _sendrecv("sendrecv", "ring: each rank sends to the next and receives from the one before"),
    _sendrecv("sendrecv_pairs", "neighbours in pairs, both ways at once"),
    _sendrecv(
        "sendrecv_bisection", "each rank with the one half the world away, both ways at once"
    ),
    Collective(
        "barrier",
        False,
        False,
        _nothing,
        lambda n: 0.0,
        lambda backend, op: backend.wait_for_all(op),
        _no_segments,
        moves=False,
    ),
)

#: Between the two ranks of a pair, not in the table: there and back one after the other, and both
#: ways at once.  The root is the other one.
PING_PONG = Collective(
    "ping_pong", False, True, _whole, _once, lambda backend, op: backend.ping_pong(op), _roots
)
EXCHANGE = Collective(
    "exchange", False, True, _whole, _once, lambda backend, op: backend.exchange(op), _roots
)

COLLECTIVES: dict[str, Collective] = {row.name: row for row in _ROWS}

#: Other tools' names.
ALIASES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all_v",
    "bcast": "broadcast",
    "ring": "sendrecv",
    "bisection": "sendrecv_bisection",
}


def collective_named(text: str) -> Collective:
    """Raises UsageError that lists the names."""
    row = COLLECTIVES.get(ALIASES.get(text, text))
    if row is None:
        raise UsageError(f"collective {text!r}: expected one of {', '.join(COLLECTIVES)}")
    return row


def crossing_bytes(row: Collective, rank: int, hosts: tuple[str, ...], total: int) -> float | None:
    """Bytes that `rank` sends to other hosts if each goes straight to where it is needed.

    `hosts` holds the host of each rank, `total` is S.  None where it depends on the algorithm: of
    the reductions, broadcast, and barrier.  Of all_gather it is what the rank receives.
    """
    n = len(hosts)
    away = sum(host != hosts[rank] for host in hosts)
    if row.name in ("all_to_all", "all_gather"):
        return total * away / n
    if row.name == "all_to_all_v":
        # In units of a 1024th of the even part; the split of large parts is the same.
        sent = uneven(rank, n, 1024)
        other = sum(s for s, host in zip(sent, hosts, strict=True) if host != hosts[rank])
        return total * other / (1024 * n)
    partner = row.partner(rank, n)
    if partner is not None:
        return float(total) if hosts[partner[0]] != hosts[rank] else 0.0
    return None
