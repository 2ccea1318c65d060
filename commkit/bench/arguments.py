"""nccl-tests' flags, checked: what to sweep."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from commkit.errors import UsageError
from commkit.measure.numbers import Number, numbers_named, redops_named

_SHIFT = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_DEFAULT_SIZE = 32 << 20
_DEFAULT_STEP = 1 << 20
#: A sweep that cannot end in a working day is a typing error.
_MOST_SIZES = 10_000
_LARGEST = 1 << 50


def parse_size(flag: str, text: str) -> int:
    """`64`, `8K`, `32M`, `1G`, `2T` (powers of 1024) -> bytes.

    Unlike nccl-tests, which reads `8Kb` and `8KiB` as 8K and `8X` as 8, this raises UsageError
    for trailing text.
    """
    match = re.fullmatch(r"(\d{1,16})([KMGT]?)", text.strip(), re.ASCII | re.IGNORECASE)
    if match is None:
        raise UsageError(f"{flag} {text}: expected a size in bytes such as 8, 64K, 32M, 1G or 2T")
    size = int(match[1]) << _SHIFT[match[2].upper()]
    if size > _LARGEST:
        raise UsageError(f"{flag} {text}: expected at most {_LARGEST >> 40}T")
    return size


@dataclass(frozen=True, slots=True)
class Gate:
    """The least bus bandwidth (1e9 bytes a second) for sizes from `size` bytes on."""

    size: int
    busbw: float


def parse_gate(text: str) -> Gate:
    """`GB/s`, or `SIZE:GB/s`.  Raises UsageError for anything else."""
    size, _, number = text.rpartition(":")
    try:
        busbw = float(number)
    except ValueError:
        busbw = math.nan
    if not 0 < busbw < math.inf:
        raise UsageError(f"--min-busbw {text}: expected GB/s above 0, or SIZE:GB/s such as 1G:300")
    return Gate(parse_size("--min-busbw", size) if size else 0, busbw)


@dataclass(frozen=True, slots=True)
class Arguments:
    """A checked plan; `repr` is compared over the ranks, so it holds nothing of one rank's own."""

    minimum: int
    maximum: int
    factor: int  # 0: step by `step` bytes
    step: int
    iterations: int
    warmup: int
    checks: int
    numbers: tuple[Number, ...]
    redops: tuple[str, ...]
    gates: tuple[Gate, ...] = ()
    timeout: float | None = None  # seconds for one size; None: from the sizes before it
    backend: str = "auto"
    stock: bool = False
    nproc: int = 0
    json: str = ""

    def sizes(self) -> tuple[int, ...]:
        return tuple(_sizes(self.minimum, self.maximum, self.factor, self.step))


def _sizes(minimum: int, maximum: int, factor: int, step: int) -> Iterator[int]:
    size = minimum
    while size <= maximum:
        yield size
        # Nothing times the factor is nothing for ever.
        size = size + step if not factor else size * factor or 8


def _how_many(minimum: int, maximum: int, factor: int, step: int) -> int:
    if factor:
        return sum(1 for _ in _sizes(minimum, maximum, factor, step))
    return (maximum - minimum) // step + 1


def plan(
    *,
    minbytes: str | None = None,
    maxbytes: str | None = None,
    stepfactor: int | None = None,
    stepbytes: str | None = None,
    iters: int = 20,
    warmup_iters: int = 1,
    check: int = 1,
    datatype: str = "float",
    op: str = "sum",
    min_busbw: tuple[str, ...] = (),
    timeout: float | None = None,
    backend: str = "auto",
    stock: bool = False,
    nproc: int | None = None,
    json: str = "",
) -> Arguments:
    """Check what the command line gave.  Raises UsageError naming flag, value and remedy.

    As in nccl-tests a missing -b or -e is 32M; here the given one moves the other along rather
    than make an empty range.
    """
    low = None if minbytes is None else parse_size("-b", minbytes)
    high = None if maxbytes is None else parse_size("-e", maxbytes)
    if low is None:
        low = _DEFAULT_SIZE if high is None else min(_DEFAULT_SIZE, high)
    minimum, maximum = low, max(_DEFAULT_SIZE, low) if high is None else high
    if minimum > maximum:
        raise UsageError(f"-b {minbytes} is larger than -e {maxbytes}: expected -b <= -e")
    step = _DEFAULT_STEP if stepbytes is None else parse_size("-i", stepbytes)
    if step <= 0:
        raise UsageError(f"-i {stepbytes}: step must be > 0")
    # A factor of 1 is nccl-tests' way to say `by bytes`.
    by_bytes = stepfactor is None or (stepfactor == 1 and stepbytes is not None)
    if not by_bytes and stepbytes is not None:
        raise UsageError(f"-f {stepfactor} -i {stepbytes}: give a factor or a step, not both")
    if not by_bytes and stepfactor is not None and stepfactor < 2:
        raise UsageError(f"-f {stepfactor}: factor must be >= 2 (or give -i for a step in bytes)")
    factor = 0 if by_bytes else stepfactor or 0
    many = _how_many(minimum, maximum, factor, step)
    if many > _MOST_SIZES:
        raise UsageError(
            f"-b {minimum} -e {maximum} -i {step}: {many} sizes; expected at most {_MOST_SIZES}: "
            "use a larger -i, or -f 2"
        )
    for flag, value, least in (("-n", iters, 1), ("-w", warmup_iters, 0), ("-c", check, 0)):
        if value < least:
            raise UsageError(f"{flag} {value}: expected at least {least}")
    if nproc is not None and not 1 <= nproc <= 1024:
        raise UsageError(f"--nproc {nproc}: expected 1 to 1024 ranks on this host")
    if timeout is not None and not 0 < timeout < 1e6:
        raise UsageError(f"--timeout {timeout:g}: expected seconds, above 0 and below 1000000")
    return Arguments(
        minimum=minimum,
        maximum=maximum,
        factor=factor,
        step=step,
        iterations=iters,
        warmup=warmup_iters,
        checks=check,
        numbers=numbers_named(datatype),
        redops=redops_named(op),
        gates=tuple(parse_gate(text) for text in min_busbw),
        timeout=timeout,
        backend=backend,
        stock=stock,
        nproc=nproc or 0,
        json=json,
    )
