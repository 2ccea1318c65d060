"""What the engine needs from a communication library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch

from commkit.errors import CommkitError
from commkit.measure.collectives import ALL_REDUCE, Collective
from commkit.measure.numbers import Number
from commkit.measure.operation import Operation

Buffer: TypeAlias = torch.Tensor

#: How calls are made.  blocking: one after the other; async: each is issued and then waited for;
#: coalesced: several are issued together; graph: replayed from a captured graph.
MODES = ("blocking", "async", "coalesced", "graph")


class Unsupported(CommkitError):
    """The library has no such reduction for this type; nothing is wrong with the world."""


class Backend(Protocol):
    """A group of ranks that can run, time and report collectives.

    Calls are ordered as the library does it; their results are there after `synchronize`.  `rank`
    and `world_size` are of the group.  `marks` grows while something is timed: a thread that asks
    how far this rank has come reads its length.  `verifies` is false where no data are moved.
    """

    name: str
    device: torch.device
    clock: str
    rank: int
    world_size: int
    verifies: bool
    marks: list[int]

    def buffer(self, count: int, number: Number) -> Buffer: ...
    def run(self, op: Operation) -> None:
        """One call of the operation's row, waited for as the mode says."""

    def caller(self, op: Operation, mode: str, aggregated: int) -> Callable[[], None]:
        """What one timed iteration does: `aggregated` calls.  Raises Unsupported."""

    # one method a row of collectives.COLLECTIVES
    def all_reduce(self, send: Buffer, receive: Buffer, redop: str) -> None: ...
    def all_gather(self, op: Operation) -> None: ...
    def reduce_scatter(self, op: Operation) -> None: ...
    def all_to_all(self, op: Operation) -> None: ...
    def all_to_all_v(self, op: Operation) -> None: ...
    def broadcast(self, op: Operation) -> None: ...
    def reduce(self, op: Operation) -> None: ...
    def gather_to(self, op: Operation) -> None: ...
    def scatter_from(self, op: Operation) -> None: ...
    def exchange(self, op: Operation) -> None: ...
    def ping_pong(self, op: Operation) -> None: ...
    def wait_for_all(self, op: Operation) -> None: ...

    def synchronize(self) -> None: ...
    def barrier(self) -> None: ...
    def time(self, call: Callable[[], None], iterations: int) -> list[float]:
        """Seconds each iteration took on this rank."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values (as many on each), in rank order."""

    def gather_text(self, text: str) -> list[str]: ...
    def supports(self, number: Number, redop: str, row: Collective = ALL_REDUCE) -> str:
        """'' if the row takes this type and reduction, else the library's own words."""


def torch_dtype(number: Number) -> torch.dtype | None:
    """None where this torch does not have the type."""
    found = getattr(torch, number.torch_name, None)
    return found if isinstance(found, torch.dtype) else None


def zeros(count: int, number: Number, device: torch.device) -> Buffer:
    """Zeros: repeated sums in place of anything else overflow, and denormals are slow."""
    dtype = torch_dtype(number)
    if dtype is None:
        raise Unsupported(f"torch {torch.__version__} has no type {number.torch_name}")
    return torch.zeros(count, dtype=dtype, device=device)


def probe(
    row: Collective, number: Number, redop: str, rank: int, world_size: int, device: torch.device
) -> Operation:
    """The smallest operation of a row, out of place, to see whether a library takes it."""
    size = 16 * world_size if row is not ALL_REDUCE else number.size
    shape = row.shape(size, number.size, world_size)
    return Operation(
        row,
        shape,
        zeros(shape.send, number, device),
        zeros(shape.receive, number, device),
        redop,
        rank,
        world_size,
        root=0,
        in_place=False,
    )
