"""What the engine needs from a communication library, and torch.distributed's version of it."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from commkit.errors import CommkitError
from commkit.measure.numbers import Number

Buffer: TypeAlias = torch.Tensor

_REDOPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}


class Unsupported(CommkitError):
    """The library has no such reduction for this type; nothing is wrong with the world."""


class Backend(Protocol):
    """A world of ranks that can run, time and report collectives.

    `all_reduce` orders work as the library does; its result is there after `synchronize`.
    """

    name: str
    device: torch.device
    clock: str
    rank: int
    world_size: int

    def buffer(self, count: int, number: Number) -> Buffer: ...
    def all_reduce(self, send: Buffer, receive: Buffer, redop: str) -> None: ...
    def synchronize(self) -> None: ...
    def barrier(self) -> None: ...
    def time(self, call: Callable[[], None], iterations: int) -> list[float]:
        """Seconds each iteration took on this rank."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values (as many on each), in rank order."""

    def gather_text(self, text: str) -> list[str]: ...
    def supports(self, number: Number, redop: str) -> str:
        """'' if all_reduce takes this type and reduction, else the library's own words."""


def torch_dtype(number: Number) -> torch.dtype | None:
    """None where this torch does not have the type."""
    found = getattr(torch, number.torch_name, None)
    return found if isinstance(found, torch.dtype) else None


class TorchBackend:
    """The default process group.  Requires that it exists."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.clock = "cuda-events" if device.type == "cuda" else "monotonic"

    def buffer(self, count: int, number: Number) -> Buffer:
        """Zeros: repeated sums in place of anything else overflow, and denormals are slow."""
        dtype = torch_dtype(number)
        if dtype is None:
            raise Unsupported(f"torch {torch.__version__} has no type {number.torch_name}")
        return torch.zeros(count, dtype=dtype, device=self.device)

    def all_reduce(self, send: Buffer, receive: Buffer, redop: str) -> None:
        if send is not receive:
            receive.copy_(send)
        dist.all_reduce(receive, _REDOPS[redop])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        # Not dist.barrier: that one guesses a device where none is bound.
        dist.all_reduce(torch.zeros(1, device=self.device))
        self.synchronize()

    def time(self, call: Callable[[], None], iterations: int) -> list[float]:
        if self.device.type == "cuda":
            return self._time_with_events(call, iterations)
        marks = [time.perf_counter_ns()]
        for _ in range(iterations):
            call()
            marks.append(time.perf_counter_ns())
        return [(b - a) * 1e-9 for a, b in itertools.pairwise(marks)]

    def _time_with_events(self, call: Callable[[], None], iterations: int) -> list[float]:
        # Events are ordered on the device, so the host's launch time does not count.
        event: Any = torch.cuda.Event  # torch leaves it untyped
        marks = [event(enable_timing=True) for _ in range(iterations + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        self.synchronize()
        return [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(marks)]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine)
        return [row.tolist() for row in rows]

    def gather_text(self, text: str) -> list[str]:
        data = text.encode()
        longest = max(int(row[0]) for row in self.gather([len(data)]))
        padded = bytearray(data.ljust(longest + 1, b"\0"))
        mine = torch.frombuffer(padded, dtype=torch.uint8).to(self.device)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine)
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in rows]

    def supports(self, number: Number, redop: str) -> str:
        """Tries one element.  Libraries refuse a type on every rank alike."""
        try:
            probe = self.buffer(1, number)
            self.all_reduce(probe, probe, redop)
            self.synchronize()
        except Unsupported as error:
            return str(error)
        except (RuntimeError, ValueError, TypeError) as error:
            text = str(error).partition("\n")[0]
            # A lost connection is a RuntimeError too, and must not pass for a refusal.
            if isinstance(error, RuntimeError) and not _REFUSAL.search(text):
                raise
            return text
        return ""


_REFUSAL = re.compile(
    r"invalid scalar type|can't be cast|unsupported|not supported|not implemented|unconvertible"
    r"|unhandled|cannot use|invalid (data|scalar|reduction)|requires nccl|float8|unknown type",
    re.IGNORECASE,
)
