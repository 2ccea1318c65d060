"""The text format of nccl-tests 2.19, which scripts everywhere already read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from commkit.bench.arguments import Arguments
from commkit.measure.collectives import Collective

if TYPE_CHECKING:
    from commkit.measure.engine import Placement, Result

LABELS = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
HALF = "  {:>7}  {:>6}  {:>6}  {:>6}"
#: Lines for single ranks before the header says `and N more`.
_DEVICES = 64


def fitted(value: float, width: int) -> str:
    """As many digits as fit: 2, 1 or no decimals, else an exponent, as nccl-tests does it."""
    for decimals in (2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:.{1 if width >= 7 else 0}e}"


def plan_lines(arguments: Arguments, row: Collective) -> list[str]:
    graph = arguments.aggregated if arguments.mode == "graph" else 0
    step = f"{arguments.factor}(factor)" if arguments.factor else f"{arguments.step}(bytes)"
    return [
        f"# Collective test starting: {row.name}",
        f"# nThread 1 nGpus 1 minBytes {arguments.minimum} maxBytes {arguments.maximum} "
        f"step: {step} warmup iters: {arguments.warmup} iters: {arguments.iterations} "
        f"agg iters: {1 if graph else arguments.aggregated} validation: {arguments.checks} "
        f"graph: {graph} unalign: 0",
        "#",
    ]


def device_lines(ranks: Sequence[tuple[str, int, str]]) -> list[str]:
    """`ranks` holds (host name, pid, device) of each rank."""
    lines = ["# Using devices"]
    for rank, (host, pid, device) in enumerate(ranks[:_DEVICES]):
        lines.append(f"#  Rank {rank:2d} Group  0 Pid {pid:6d} on {host:>10} device {device}")
    if len(ranks) > _DEVICES:
        lines.append(f"#  ... and {len(ranks) - _DEVICES} more ranks")
    return lines


def label_lines() -> list[str]:
    half = ("time", "algbw", "busbw", "#wrong")
    units = ("(us)", "(GB/s)", "(GB/s)", "")
    blank = LABELS.format("", "", "", "", "")
    return [
        "#",
        blank + "           out-of-place                       in-place          ",
        LABELS.format("size", "count", "type", "redop", "root") + 2 * HALF.format(*half),
        LABELS.format("(B)", "(elements)", "", "", "") + 2 * HALF.format(*units),
    ]


def _half(placement: Placement) -> str:
    wrong = "N/A" if placement.wrong is None else f"{placement.wrong:g}"
    return HALF.format(
        fitted(placement.summary.p50 * 1e6, 7),
        fitted(placement.algbw, 6),
        fitted(placement.busbw or 0.0, 6),
        wrong,
    )


def result_line(result: Result, type_name: str, redop: str) -> str:
    head = f"{result.bytes:12d}  {result.count:12d}  {type_name:>8}  {redop:>6}  {result.root:>6}"
    return head + _half(result.out_of_place) + _half(result.in_place)


def first_wrong_lines(result: Result) -> list[str]:
    """Below a row with wrong elements: where the first one is and what it holds."""
    lines = []
    for placement in (result.out_of_place, result.in_place):
        wrong = placement.first_wrong
        if wrong is not None:
            where = "in place" if placement.in_place else "out of place"
            got = f"{wrong.got:.17g}" if isinstance(wrong.got, float) else wrong.got
            lines.append(
                f"# first bad ({where}): rank {wrong.rank} index {wrong.index} "
                f"got {got} expected {wrong.expected:.17g}"
            )
    return lines


def average_busbw(results: Sequence[Result]) -> float:
    """Over both placements of all rows, as nccl-tests; rows of no bytes do not count."""
    values = [
        placement.busbw or 0.0
        for result in results
        if result.bytes
        for placement in (result.out_of_place, result.in_place)
    ]
    return sum(values) / len(values) if values else 0.0


def footer_lines(results: Sequence[Result], row: Collective) -> list[str]:
    wrong = [place.wrong for r in results for place in (r.out_of_place, r.in_place)]
    # nccl-tests says no more than OK where nothing was checked, and its parsers look for that.
    lines = total_lines(wrong, average_busbw(results), "OK (not verified)")
    return [*lines, f"# Collective test concluded: {row.name}"]


def total_lines(wrong: Iterable[float | None], average: float, unchecked: str) -> list[str]:
    """Below a table: wrong elements of all rows (None: not counted), and the average busbw.

    `unchecked` is the verdict where no row was counted.
    """
    counted = [number for number in wrong if number is not None]
    total = sum(counted)
    said = ("FAILED" if total else "OK") if counted else unchecked
    return [
        f"# {'Out of bounds values':<20} : {total} {said}",
        f"# {'Avg bus bandwidth':<20} : {average:g} ",
        "#",
    ]
