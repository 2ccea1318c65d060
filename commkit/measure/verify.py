"""Fill buffers from a pattern, run, count the wrong elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from commkit.measure.backend import Backend, Buffer
from commkit.measure.collectives import Collective
from commkit.measure.patterns import Pattern

#: Elements filled and compared at a time: bounds the memory that index arithmetic needs.
CHUNK = 1 << 20

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


def _chunks(
    pattern: Pattern, count: int, seed: int, device: torch.device
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """(elements, hash, scale) for pieces of the index range."""
    for start in range(0, count, CHUNK):
        stop = min(count, start + CHUNK)
        index = torch.arange(start, stop, dtype=torch.int64, device=device)
        scale = _mixed(index, seed, 0x9E3779B97F4A7C1) % pattern.scales + 1
        yield slice(start, stop), _mixed(index, seed, 0xC2B2AE3D27D4EB5), scale


def fill(buffer: Buffer, pattern: Pattern, rank: int, seed: int) -> None:
    """Write this rank's contribution.  The definition is patterns.Pattern.value."""
    weights = torch.tensor(pattern.weights, dtype=torch.int64, device=buffer.device)
    for part, mixed, scale in _chunks(pattern, buffer.numel(), seed, buffer.device):
        slot = (mixed + rank) % pattern.world_size
        weight = weights[slot]
        if pattern.redop == "prod":
            values = (1 << weight) * torch.where(slot == 0, scale, 1)
        elif pattern.redop in ("min", "max"):
            values = weight + scale
        else:
            values = weight * scale
        buffer[part] = values.to(buffer.dtype)


def compare(buffer: Buffer, pattern: Pattern, seed: int) -> Check:
    """Count elements that are not as expected; nan is never as expected."""
    # One expected value a scale, by the same function that the tests hold against brute force.
    table = torch.tensor(
        [pattern.expected(scale) for scale in range(pattern.scales + 1)],
        dtype=torch.float64,
        device=buffer.device,
    )
    wrong, first = 0, Check()
    for part, _, scale in _chunks(pattern, buffer.numel(), seed, buffer.device):
        # float64 holds every expected value exactly, and no other value of a type rounds to it.
        got, expected = buffer[part].to(torch.float64), table[scale]
        bad = ~((got - expected).abs() <= pattern.tolerance * expected)
        found = int(bad.sum())
        if found and not wrong:
            at = int(bad.nonzero()[0])
            first = Check(0, part.start + at, float(got[at]), float(expected[at]))
        wrong += found
    return Check(wrong, first.index, first.got, first.expected)


def verify(
    backend: Backend,
    row: Collective,
    send: Buffer,
    receive: Buffer,
    redop: str,
    pattern: Pattern,
    seed: int,
) -> Check:
    """One pass: fresh data, one run, comparison on this rank.

    The seed differs from pass to pass, so that the last pass's result left in a buffer is wrong.
    """
    fill(send, pattern, backend.rank, seed)
    backend.synchronize()
    row.run(backend, send, receive, redop)
    backend.synchronize()
    return compare(receive, pattern, seed)
