"""Two sets of results, size by size: how much slower, how sure, and whether that is a regression.

`against` is what a run with --baseline calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from commkit.bench import formats
from commkit.bench.bootstrap import Ratio, ratio, typical
from commkit.bench.formats.table import key_of
from commkit.errors import EXIT_OK, EXIT_REGRESSION, EXIT_WRONG_DATA, UsageError
from commkit.records import Measurement

THRESHOLD = 0.05
#: What happened to one row.
SLOWER, FASTER, SAME, UNSURE = "SLOWER", "faster", "same", "unsure"


@dataclass(frozen=True, slots=True)
class Row:
    """One collective at one size and placement, on both sides."""

    before: Sequence[Measurement]  # one a run
    after: Sequence[Measurement]
    before_us: float  # the geometric mean over runs of their medians
    after_us: float
    ratio: Ratio
    verdict: str

    @property
    def record(self) -> Measurement:
        return self.after[0]


@dataclass(slots=True)
class Comparison:
    threshold: float
    rows: list[Row] = field(default_factory=list)
    only_before: list[Measurement] = field(default_factory=list)
    only_after: list[Measurement] = field(default_factory=list)
    #: Of versions, settings and places, what is not the same on both sides.
    differences: list[str] = field(default_factory=list)
    #: Rows of the second side with wrong data, whether there is something to compare or not.
    wrong: int = 0

    @property
    def slower(self) -> list[Row]:
        return [row for row in self.rows if row.verdict == SLOWER]

    @property
    def exit_code(self) -> int:
        """Wrong data come first: a fast wrong answer is no answer."""
        if self.wrong:
            return EXIT_WRONG_DATA
        return EXIT_REGRESSION if self.slower else EXIT_OK

    def lines(self) -> Iterator[str]:
        """A table, then what is not comparable, then one line of verdict."""
        for text in self.differences:
            yield f"# differs: {text}"
        yield (
            f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'place':>5}  "
            f"{'before':>9}  {'after':>9}  {'ratio':>6}  {'95 % interval':>15}  {'runs':>5}  "
            "verdict"
        )
        shown = ""
        for row in self.rows:
            name = _title(row.record)
            if name != shown:
                shown = name
                yield f"# {name}"
            yield row_line(row)
        for what, records in (("before", self.only_before), ("after", self.only_after)):
            if records:
                sizes = ", ".join(str(record.bytes) for record in records[:8])
                more = f" and {len(records) - 8} more" if len(records) > 8 else ""
                yield f"# only {what}: {_title(records[0])}: size {sizes}{more}"
        if any(row.ratio.low is None for row in self.rows):
            yield (
                "# no interval: no times of single iterations and no repeated runs; "
                "such rows are judged by the ratio alone"
            )
        elif any(min(len(row.before), len(row.after)) == 1 for row in self.rows):
            yield (
                "# one run on a side: its intervals are over iterations and do not show how much "
                "runs differ; run again with the same --json to have several"
            )
        counts = {
            verdict: sum(row.verdict == verdict for row in self.rows)
            for verdict in (SLOWER, FASTER, SAME, UNSURE)
        }
        said = f"{self.wrong} with wrong data, " if self.wrong else ""
        yield (
            f"# {len(self.rows)} rows at {100 * self.threshold:g} %: {said}"
            f"{counts[SLOWER]} slower, {counts[FASTER]} faster, {counts[SAME]} the same, "
            f"{counts[UNSURE]} unsure"
        )


def row_line(row: Row) -> str:
    record, found = row.record, row.ratio
    between = "-" if found.low is None else f"{found.low:.3f} to {found.high:.3f}"
    place = "in" if record.in_place else "out"
    wrong = sum(item.wrong or 0 for item in row.after)
    return (
        f"{record.bytes:>12}  {record.count:>12}  {record.dtype:>8}  {record.redop:>6}  "
        f"{place:>5}  {row.before_us:>9.2f}  {row.after_us:>9.2f}  {found.value:>6.3f}  "
        f"{between:>15}  {len(row.before)}:{len(row.after):<3}  {row.verdict}"
        + (f", {wrong} wrong" if wrong else "")
    )


def compare(
    before: Iterable[Measurement], after: Iterable[Measurement], threshold: float = THRESHOLD
) -> Comparison:
    """Match rows that are about the same, and judge each.

    SLOWER: the whole interval of the ratio is above 1 + threshold; faster: below 1 / (1 +
    threshold); same: between the two; unsure: anything else.  Without an interval the ratio alone
    decides.  Raises UsageError if no row matches, saying in what the two sides differ.
    """
    after = list(after)
    first, second = _grouped(before), _grouped(after)
    found = Comparison(threshold)
    found.wrong = len({_comparable(record) for record in after if record.wrong})
    common = [key for key in second if key in first]
    if not common:
        raise UsageError(f"nothing to compare: {_why_not(first, second)}")
    for number, key in enumerate(common):
        one, other = first[key], second[key]
        old, new = _samples(one, other), _samples(other, one)
        times = ratio(old, new, seed=number)
        verdict = _verdict(times, threshold)
        found.rows.append(Row(one, other, typical(old), typical(new), times, verdict))
    found.only_before = [runs[0] for key, runs in first.items() if key not in second]
    found.only_after = [runs[0] for key, runs in second.items() if key not in first]
    found.differences = _differences(found.rows)
    return found


def against(
    path: str | os.PathLike[str], after: Iterable[Measurement], threshold: float = THRESHOLD
) -> Comparison:
    """`after`, of this run, beside the file `path` of an earlier one, of any known format."""
    return compare(formats.read(path).records, after, threshold)


def _grouped(records: Iterable[Measurement]) -> dict[tuple[object, ...], list[Measurement]]:
    groups: dict[tuple[object, ...], list[Measurement]] = {}
    for record in records:
        if record.time_us > 0:
            groups.setdefault(_comparable(record), []).append(record)
    return groups


def _comparable(record: Measurement) -> tuple[object, ...]:
    """Not the back end: comparing two of them is a use of this."""
    key = list(key_of(record))
    del key[6]
    return (record.in_place, *key)


def _samples(mine: Sequence[Measurement], other: Sequence[Measurement]) -> list[tuple[float, ...]]:
    """Single iterations where both sides have them: medians are not to be held against means."""
    if all(record.times_us and min(record.times_us) > 0 for record in (*mine, *other)):
        return [record.times_us for record in mine]
    means = all(record.mean_us for record in (*mine, *other))
    return [(record.mean_us if means and record.mean_us else record.time_us,) for record in mine]


def _verdict(found: Ratio, threshold: float) -> str:
    low = found.value if found.low is None else found.low
    high = found.value if found.high is None else found.high
    if low > 1 + threshold:
        return SLOWER
    if high < 1 / (1 + threshold):
        return FASTER
    return SAME if high <= 1 + threshold and low >= 1 / (1 + threshold) else UNSURE


def _differences(rows: Sequence[Row]) -> list[str]:
    before = _facts(record for row in rows for record in row.before)
    after = _facts(record for row in rows for record in row.after)
    said = []
    for name in sorted({*before, *after}):
        one, other = before.get(name, {"unset"}), after.get(name, {"unset"})
        if one != other:
            said.append(f"{name}: {' or '.join(sorted(one))} -> {' or '.join(sorted(other))}")
    return said


def _facts(records: Iterable[Measurement]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for record in records:
        facts = {
            "backend": record.backend,
            "device": record.device,
            "hosts": str(record.hosts or "unknown"),
            "started by": record.start,
            "time is": f"{record.time_is} ({record.tool})",
            **record.versions,
            **record.environment,
        }
        for name, value in facts.items():
            found.setdefault(name, set()).add(value)
    return found


def _title(record: Measurement) -> str:
    parts = [record.collective, f"{record.world_size or '?'} ranks"]
    parts += [part for part in (record.group, record.concurrent) if part]
    if record.source >= 0:
        parts.append(f"{record.source} to {record.peer}")
    return ", ".join(parts)


def _why_not(
    first: dict[tuple[object, ...], list[Measurement]],
    second: dict[tuple[object, ...], list[Measurement]],
) -> str:
    if not first or not second:
        return f"{'the first' if not first else 'the second'} has no rows with a time"
    sides = [[runs[0] for runs in side.values()] for side in (first, second)]
    for name in ("collective", "world_size", "dtype", "redop", "mode", "group", "bytes"):
        one, other = ({str(getattr(record, name)) for record in side} for side in sides)
        if not one & other:
            shown = [", ".join(sorted(values)[:4]) for values in (one, other)]
            return f"{name} is {shown[0]} in the first and {shown[1]} in the second"
    return "no row of the first is about the same as one of the second"
