"""Records as nccl-tests' table; wide as with its -I, and commkit's own columns at the end.

A row joins the record out of place with the one in place.  A reader that counts columns from the
left finds nccl-tests' own ones where they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from commkit.bench.table import HALF, LABELS, fitted, total_lines
from commkit.records import Measurement

_HEAD = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}"
_SPREAD = "  {:>7}  {:>7}  {:>7}  {:>7}"
_OWN = "  {:>7}  {:>7}  {:>6}  {:>6}  {:>6}  {:>6}"
_OWN_LABELS = (
    ("p95", "p95-ip", "slow", "skew%", "xhost", "link%"),
    ("(us)", "(us)", "(rank)", "", "(GB/s)", ""),
)
_BLANK = "-"

Row = tuple[Measurement | None, Measurement | None]


def rows(records: Iterable[Measurement]) -> list[Row]:
    """(out of place, in place), in order; where one of them is missing, None."""
    found: list[Row] = []
    waiting: dict[tuple[object, ...], int] = {}
    for record in records:
        key = (record.run, *key_of(record))
        if record.in_place and key in waiting:
            index = waiting.pop(key)
            found[index] = (found[index][0], record)
        elif record.in_place:
            found.append((None, record))
        else:
            waiting[key] = len(found)
            found.append((record, None))
    return found


def key_of(record: Measurement) -> tuple[object, ...]:
    """What a row is about: all but in_place, the run and what came out."""
    return (
        record.collective,
        record.dtype,
        record.redop,
        record.root,
        record.bytes,
        record.world_size,
        record.backend,
        record.mode,
        record.aggregated,
        record.group,
        record.groups,
        record.concurrent,
        record.source,
        record.peer,
    )


def title(record: Measurement) -> str:
    """A line above the rows of one collective in one world."""
    parts = [record.collective, f"{record.world_size or '?'} ranks"]
    if record.groups > 1 or record.group:
        parts.append(f"{record.groups} groups {record.group}".rstrip())
    if record.concurrent:
        parts.append(f"together {record.concurrent}")
    if record.source >= 0:
        parts.append(f"{record.source} to {record.peer}")
    if record.mode != "blocking":
        parts.append(record.mode)
    parts += [part for part in (record.backend, record.device) if part]
    parts.append(f"time: {record.time_is}, {record.tool}")
    return "# " + ", ".join(parts)


def lines(records: Sequence[Measurement], *, wide: bool = False) -> Iterator[str]:
    """A table for each stretch of rows about the same collective and world, with totals."""
    stretch: list[Row] = []
    shown = ""
    for row in rows(records):
        name = title(row[0] or row[1])  # type: ignore[arg-type]
        if name != shown:
            yield from _totals(stretch)
            stretch, shown = [], name
            yield name
            yield from label_lines(wide=wide)
        stretch.append(row)
        yield row_line(*row, wide=wide)
    yield from _totals(stretch)


def label_lines(*, wide: bool = False) -> list[str]:
    names, units = ("time", "algbw", "busbw", "#wrong"), ("(us)", "(GB/s)", "(GB/s)", "")
    half = [HALF.format(*names), HALF.format(*units)]
    above = "           out-of-place                       in-place          "
    own = ["", ""]
    if wide:
        half[0] += _SPREAD.format("i_min", "i_max", "i_p99", "i_cv%")
        half[1] += _SPREAD.format("(us)", "(us)", "(us)", "(%)")
        above = f"{'out-of-place (+ per-iteration)':>47}{'in-place (+ per-iteration)':>62}"
        own = [_OWN.format(*labels) for labels in _OWN_LABELS]
    return [
        "#",
        LABELS.format("", "", "", "", "") + above,
        LABELS.format("size", "count", "type", "redop", "root") + 2 * half[0] + own[0],
        LABELS.format("(B)", "(elements)", "", "", "") + 2 * half[1] + own[1],
    ]


def row_line(outer: Measurement | None, inner: Measurement | None, *, wide: bool = False) -> str:
    first = inner if outer is None else outer
    assert first is not None
    head = _HEAD.format(
        first.bytes, first.count, first.dtype or _BLANK, first.redop or "none", first.root
    )
    text = head + _half(outer, wide) + _half(inner, wide)
    if wide:
        last = inner or first
        slow = _BLANK if last.slowest_rank < 0 else str(last.slowest_rank)
        skew = fitted(100 * last.skew, 6) if last.rank_times_us else _BLANK
        text += _OWN.format(
            _p95(outer),
            _p95(inner),
            slow,
            skew,
            _share(last.inter_host_gbps),
            _share(last.link_percent),
        )
    return text


def _half(record: Measurement | None, wide: bool) -> str:
    if record is None:  # words, so that readers that split a line still count right
        return HALF.format(*4 * ["N/A"]) + (_SPREAD.format(*4 * [_BLANK]) if wide else "")
    text = HALF.format(
        fitted(record.time_us, 7),
        fitted(record.algbw_gbps, 6),
        _busbw(record),
        "N/A" if record.wrong is None else f"{record.wrong:g}",
    )
    if wide:
        cv = _BLANK if record.cv is None else fitted(100 * record.cv, 7)
        text += _SPREAD.format(*map(_time, (record.min_us, record.max_us, record.p99_us)), cv)
    return text


def _p95(record: Measurement | None) -> str:
    return _BLANK if record is None else _time(record.p95_us)


def _time(value: float | None) -> str:
    return _BLANK if value is None else fitted(value, 7)


def _busbw(record: Measurement) -> str:
    """nccl-tests prints 0 for one rank, where it is not defined."""
    if record.busbw_gbps is None and record.world_size != 1 and record.bytes:
        return "N/A"
    return fitted(record.busbw_gbps or 0.0, 6)


def _share(value: float | None) -> str:
    return _BLANK if value is None else fitted(value, 6)


def _totals(stretch: Sequence[Row]) -> list[str]:
    records = [record for row in stretch for record in row if record is not None]
    if not records:
        return []
    bandwidths = [
        record.busbw_gbps or 0.0
        for record in records
        if record.bytes and (record.busbw_gbps is not None or record.world_size == 1)
    ]
    average = sum(bandwidths) / len(bandwidths) if bandwidths else 0.0
    return total_lines((record.wrong for record in records), average, "not verified")
