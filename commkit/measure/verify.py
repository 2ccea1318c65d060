"""Fill buffers from a pattern, run, count the wrong elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from commkit.measure.backend import Backend, Buffer
from commkit.measure.collectives import REDUCED
from commkit.measure.numbers import Number
from commkit.measure.operation import Operation
from commkit.measure.patterns import Pattern

#: Elements filled and compared at a time: index arithmetic on so many stays in a core's cache.
CHUNK = 1 << 15
#: ... times this on a GPU, where launching costs more than memory.
_WIDER = 32

_SIGNLESS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Check:
    """What this rank found; index, got and expected describe its first wrong element."""

    wrong: int = 0
    index: int = -1
    got: float = 0.0
    expected: float = 0.0


def _mixed(index: torch.Tensor, seed: int, odd: int) -> torch.Tensor:
    """A number from 0 to 2**31-1 for each index; the multiplication is meant to wrap around."""
    product = (index + (seed * 7919 + 1)) * odd
    return ((product >> 29) ^ (product >> 11)) & _SIGNLESS


def _indices(count: int, offset: int, device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
    """(elements, their numbers from `offset` on) in pieces."""
    step = CHUNK * _WIDER if device.type == "cuda" else CHUNK
    for start in range(0, count, step):
        stop = min(count, start + step)
        yield (
            slice(start, stop),
            torch.arange(offset + start, offset + stop, dtype=torch.int64, device=device),
        )


def _chunks(
    pattern: Pattern, count: int, seed: int, offset: int, device: torch.device
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """(elements, hash, scale) for pieces of the index range."""
    for part, index in _indices(count, offset, device):
        scale = _mixed(index, seed, 0x9E3779B97F4A7C1) % pattern.scales + 1
        yield part, _mixed(index, seed, 0xC2B2AE3D27D4EB5), scale


def fill(buffer: Buffer, pattern: Pattern, rank: int, seed: int) -> None:
    """Write this rank's contribution.  The definition is patterns.Pattern.value."""
    weights = torch.tensor(pattern.weights, dtype=torch.int64, device=buffer.device)
    for part, mixed, scale in _chunks(pattern, buffer.numel(), seed, 0, buffer.device):
        slot = (mixed + rank) % pattern.world_size
        weight = weights[slot]
        if pattern.redop == "prod":
            values = (1 << weight) * torch.where(slot == 0, scale, 1)
        elif pattern.redop in ("min", "max"):
            values = weight + scale
        else:
            values = weight * scale
        buffer[part] = values.to(buffer.dtype)


def compare(buffer: Buffer, pattern: Pattern, seed: int, offset: int = 0) -> Check:
    """Count elements that are not as expected; nan is never as expected.

    `offset` is the number of the first element in the ranks' send buffers.
    """
    # One expected value a scale, by the same function that the tests hold against brute force.
    table = torch.tensor(
        [pattern.expected(scale) for scale in range(pattern.scales + 1)],
        dtype=torch.float64,
        device=buffer.device,
    )
    wrong, first = 0, Check()
    for part, _, scale in _chunks(pattern, buffer.numel(), seed, offset, buffer.device):
        # float64 holds every expected value exactly, and no other value of a type rounds to it.
        got, expected = buffer[part].to(torch.float64), table[scale]
        bad = ~((got - expected).abs() <= pattern.tolerance * expected)
        found = int(bad.sum())
        if found and not wrong:
            at = int(bad.nonzero()[0])
            first = Check(0, part.start + at, float(got[at]), float(expected[at]))
        wrong += found
    return Check(wrong, first.index, first.got, first.expected)


def _own(index: torch.Tensor, number: Number, rank: int, seed: int) -> torch.Tensor:
    """What is copied: a number from 1 to the largest exact one that depends on rank and index."""
    return _mixed(index + rank * 0x51ED270B, seed, 0xD6E8FEB86659FD9) % number.exact + 1


def fill_own(buffer: Buffer, number: Number, rank: int, seed: int) -> None:
    """Data for collectives that only move them: from whom and which element can be seen."""
    for part, index in _indices(buffer.numel(), 0, buffer.device):
        buffer[part] = _own(index, number, rank, seed).to(buffer.dtype)


def compare_own(buffer: Buffer, number: Number, source: int, seed: int, offset: int) -> Check:
    """Count elements that are not those of `source` from its element `offset` on."""
    wrong, first = 0, Check()
    for part, index in _indices(buffer.numel(), offset, buffer.device):
        got = buffer[part].to(torch.float64)
        expected = _own(index, number, source, seed).to(torch.float64)
        bad = ~(got == expected)
        found = int(bad.sum())
        if found and not wrong:
            at = int(bad.nonzero()[0])
            first = Check(0, part.start + at, float(got[at]), float(expected[at]))
        wrong += found
    return Check(wrong, first.index, first.got, first.expected)


def prepare(op: Operation, number: Number, pattern: Pattern | None, seed: int) -> None:
    """Clears what is to be received, fills what is sent.  `pattern`: of the reduction, or None."""
    for buffer in (op.receive, op.send):
        buffer.zero_()
    if pattern is None:
        fill_own(op.send, number, op.rank, seed)
    else:
        fill(op.send, pattern, op.rank, seed)


def check_received(op: Operation, number: Number, pattern: Pattern | None, seed: int) -> Check:
    """Compares this rank's receive buffer with what the row says is there after a call."""
    wrong, first = 0, Check()
    for piece in op.row.segments(op.rank, op.world_size, op.shape, op.root):
        got = op.receive[piece.start : piece.start + piece.length]
        if piece.source == REDUCED:
            assert pattern is not None
            found = compare(got, pattern, seed, piece.offset)
        else:
            found = compare_own(got, number, piece.source, seed, piece.offset)
        if found.wrong and not wrong:
            first = Check(0, piece.start + found.index, found.got, found.expected)
        wrong += found.wrong
    return Check(wrong, first.index, first.got, first.expected)


def verify(
    backend: Backend, op: Operation, number: Number, pattern: Pattern | None, seed: int
) -> Check:
    """One pass: fresh data, one run, comparison on this rank.

    The seed differs from pass to pass, so that the last pass's result left in a buffer is wrong;
    what is to be received is cleared, and no expected value but an average is 0.
    """
    prepare(op, number, pattern, seed)
    backend.synchronize()
    backend.run(op)
    backend.synchronize()
    return check_received(op, number, pattern, seed)
