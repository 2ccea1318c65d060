"""nccl-tests' flags, checked: what to sweep."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from commkit.errors import UsageError
from commkit.measure.collectives import ALL_REDUCE, Collective, collective_named
from commkit.measure.numbers import Number, numbers_named, redops_named

_SHIFT = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_DEFAULT_SIZE = 32 << 20
_DEFAULT_STEP = 1 << 20
#: A sweep that cannot end in a working day is a typing error.
_MOST_SIZES = 10_000
_LARGEST = 1 << 50
#: Iterations of a size without a time budget, and at most with one; the budget of --precision.
_ITERATIONS = 20
_MOST_ITERATIONS = 10_000
_PRECISION_BUDGET = 10.0


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
    rows: tuple[Collective, ...] = (ALL_REDUCE,)
    root: int = 0
    mode: str = "blocking"
    aggregated: int = 1
    budget: float | None = None  # seconds for the iterations of one placement
    precision: float | None = None  # share of the median
    layout: str = ""
    group: str = ""  # a family of the layout
    groups: str = ""  # a rule that splits the world
    concurrent: tuple[tuple[str, Collective], ...] = ()  # (family, what it does)
    link: float | None = None  # 1e9 bytes a second that a rank's link carries one way
    preflight: bool = False
    wide: bool = False
    baseline: str = ""  # a file of results that this run is held against
    threshold: float = 0.05  # how much slower a row may be

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


def parse_percent(flag: str, text: str) -> float:
    """`2%` or `2` -> 0.02.  Raises UsageError."""
    try:
        value = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise UsageError(f"{flag} {text}: expected a percentage above 0 and below 100, such as 2%")
    return value


def parse_concurrent(text: str) -> tuple[tuple[str, Collective], ...]:
    """`tp:all_gather,dp:reduce_scatter` -> ((family, row), ...).  Raises UsageError."""
    found = []
    for item in text.split(","):
        family, colon, name = item.strip().partition(":")
        if not colon or not family or not name:
            raise UsageError(
                f"--concurrent {text}: {item.strip()!r}: expected FAMILY:COLLECTIVE, separated by "
                "commas, such as tp:all_gather,dp:reduce_scatter"
            )
        found.append((family, collective_named(name)))
    if len(found) < 2:
        raise UsageError(f"--concurrent {text}: expected two or more; one alone is --group")
    if len({family for family, _ in found}) < len(found):
        raise UsageError(f"--concurrent {text}: a family is named twice; expected each once")
    return tuple(found)


def _check_groups(layout: str, group: str, groups: str, concurrent: str) -> None:
    if groups and (layout or group):
        raise UsageError(f"--groups {groups} splits the world by a rule: leave out --layout")
    if (group or concurrent) and not layout:
        flag = f"--group {group}" if group else f"--concurrent {concurrent}"
        raise UsageError(f"{flag}: expected --layout too, such as --layout tp=2,dp=2")
    if layout and not group and not concurrent:
        raise UsageError(f"--layout {layout}: expected --group FAMILY or --concurrent too")
    if group and concurrent:
        raise UsageError(f"--group {group} --concurrent {concurrent}: give one of the two")


def _mode(asynchronous: bool, agg_iters: int, cudagraph: int) -> tuple[str, int]:
    """How calls are made, and how many to a timed iteration."""
    for flag, value, least in (("-m", agg_iters, 1), ("-G", cudagraph, 0)):
        if value < least:
            raise UsageError(f"{flag} {value}: expected at least {least}")
    if cudagraph and (asynchronous or agg_iters > 1):
        raise UsageError(f"-G {cudagraph}: a graph has its own order; leave out -m and --async")
    if cudagraph:
        return "graph", cudagraph
    if agg_iters > 1:
        return "coalesced", agg_iters
    return ("async" if asynchronous else "blocking"), 1


def plan(
    *,
    collective: str | tuple[str, ...] = "all_reduce",
    minbytes: str | None = None,
    maxbytes: str | None = None,
    stepfactor: int | None = None,
    stepbytes: str | None = None,
    iters: int | None = None,
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
    root: int = 0,
    asynchronous: bool = False,
    agg_iters: int = 1,
    cudagraph: int = 0,
    budget: float | None = None,
    precision: str | None = None,
    layout: str = "",
    group: str = "",
    groups: str = "",
    concurrent: str = "",
    link_speed: float | None = None,
    preflight: bool = False,
    wide: bool = False,
    baseline: str = "",
    threshold: str = "5%",
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
    if iters is None:
        iters = _MOST_ITERATIONS if budget and not precision else _ITERATIONS
    for flag, value, least in (
        ("-n", iters, 1),
        ("-w", warmup_iters, 0),
        ("-c", check, 0),
        ("-r", root, 0),
    ):
        if value < least:
            raise UsageError(f"{flag} {value}: expected at least {least}")
    if nproc is not None and not 1 <= nproc <= 1024:
        raise UsageError(f"--nproc {nproc}: expected 1 to 1024 ranks on this host")
    if timeout is not None and not 0 < timeout < 1e6:
        raise UsageError(f"--timeout {timeout:g}: expected seconds, above 0 and below 1000000")
    if budget is not None and not 0 < budget < 1e6:
        raise UsageError(f"--budget {budget:g}: expected seconds, above 0 and below 1000000")
    if link_speed is not None and not 0 < link_speed < 1e6:
        raise UsageError(f"--link-speed {link_speed:g}: expected GB/s above 0, such as 50 for NDR")
    _check_groups(layout, group, groups, concurrent)
    mode, aggregated = _mode(asynchronous, agg_iters, cudagraph)
    bound = None if precision is None else parse_percent("--precision", precision)
    if bound is not None and budget is None:
        budget = _PRECISION_BUDGET
    names = (collective,) if isinstance(collective, str) else collective
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
        rows=tuple(collective_named(name) for name in names),
        root=root,
        mode=mode,
        aggregated=aggregated,
        budget=budget,
        precision=bound,
        layout=layout,
        group=group,
        groups=groups,
        concurrent=parse_concurrent(concurrent) if concurrent else (),
        link=link_speed,
        preflight=preflight,
        wide=wide,
        baseline=baseline,
        threshold=parse_percent("--threshold", threshold),
    )
