"""nccl-tests' table, from its versions of 2019 to 2.19, and what commkit prints itself.

Columns are found by the words of the header line: `root` came later, `error` became `#wrong`,
-C renames `time`, -I adds four columns to each half, -S a date at the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from commkit.bench.formats.bandwidth import ranks_behind
from commkit.bench.formats.lines import streams
from commkit.bench.formats.reading import Given, Reading, Spread, identifier, record
from commkit.bench.formats.reading import number as number_of
from commkit.records import Measurement

PROGRAMS = {
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all_v",
}
_PROGRAM = re.compile(r"\b([a-z_]+?)_perf\b")
_STARTING = re.compile(r"Collective test starting: (\w+)")
_PLAN = re.compile(r"nThread:? \d+ nGpus:? \d+ minBytes:? \d+")
_RANK = re.compile(
    r"Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+\d+ on\s+(\S+) device\s+(?:\d+\s+)?(.*)"
)
_MORE = re.compile(r"\.\.\. and (\d+) more ranks")
_OURS = re.compile(r"# commkit (\S+), torch (\S+), backend (\S+), device (\w+)")
_VERSIONS = re.compile(r"nccl-tests version (\S+) nccl-headers=\d+ nccl-library=(\d+)")
_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(\d{1,18})\b")
_AVERAGE = re.compile(r"Avg bus bandwidth\s*:\s*([\d.]+(?:e[-+]\d+)?)(?=\s|$)")
_FAILED = re.compile(r"# error: |Test (?:NCCL|CUDA) failure|Test failure ")
_COUNT = re.compile(r"\d{1,18}", re.ASCII)
_FIRST = ("size", "count", "type")


def looks_like(text: str) -> bool:
    return _header_in(text) is not None or _PLAN.search(text) is not None


def _header_in(text: str) -> re.Match[str] | None:
    return re.search(
        r"size\s+count\s+type\b.*\btime\s+algbw\s+busbw", text.replace("cputime", " time")
    )


_NOTHING = {"algbw": "0", "busbw": "0"}


@dataclass(frozen=True, slots=True)
class _Columns:
    """What a header line says."""

    head: tuple[str, ...]
    half: tuple[str, ...]
    extra: int  # words behind the two halves; a date is two
    dated: bool
    cpu: bool

    @staticmethod
    def of(words: list[str]) -> _Columns | None:
        """None for a header that was cut or mixed with another line."""
        starts = [i for i, name in enumerate(words) if name in ("time", "cputime")]
        if len(starts) != 2:
            return None
        first, second = starts
        half = tuple("time" if name == "cputime" else name for name in words[first:second])
        again = tuple("time" if name == "cputime" else name for name in words[second:])
        if again[: len(half)] != half or not {"algbw", "busbw"} <= set(half):
            return None
        dated = words[-1] == "timestamp"
        extra = len(again) - len(half) + dated
        return _Columns(tuple(words[:first]), half, extra, dated, "cputime" in words)

    @property
    def whole(self) -> int:
        return len(self.head) + 2 * len(self.half) + self.extra

    def row(self, words: list[str]) -> tuple[dict[str, str], list[dict[str, str]]] | None:
        """The cells of the head and of each half; None for a row that is not whole."""
        first, one = len(self.head), len(self.half)
        cells = [words[first : first + one]]
        if len(words) in (self.whole, self.whole - 2 * self.dated):  # the date is written last
            cells.append(words[first + one : first + 2 * one])
        elif len(words) not in (self.whole - one, first + one):
            return None
        head = dict(zip(self.head, words, strict=False))
        halves = [dict(zip(self.half, cell, strict=True)) for cell in cells]
        right = re.fullmatch(r"-?\d{1,9}", head.get("root", "-1")) and all(map(_numbers, halves))
        return (head, halves) if right else None


@dataclass(slots=True)
class _Run:
    """One program's output so far."""

    number: int
    program: str = ""
    ranks: dict[tuple[int, int], str] = field(default_factory=dict)  # (group, rank) -> host
    more: int = 0
    device: str = ""
    plan: str = ""
    columns: _Columns | None = None
    rows: list[tuple[int, dict[str, str], list[dict[str, str]]]] = field(default_factory=list)
    ours: re.Match[str] | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def planned(self, name: str, default: int = 0) -> int:
        match = re.search(rf"{name}:? (\d+)", self.plan)
        return int(match[1]) if match else default


def read(text: str, given: Given) -> Reading:
    """Raises UsageError where the collective is not to be found, or worlds are mixed up."""
    reading = Reading("nccl-tests", [])
    parser = _Parser(text, given, reading)
    for stream in streams(text):
        parser.stream(stream)
    if not reading.records:
        reading.notes.append("no rows")
    return reading


class _Parser:
    def __init__(self, text: str, given: Given, reading: Reading) -> None:
        self.text, self.given, self.reading = text, given, reading
        self.mentioned = ""  # a program on a command line above
        self.run = _Run(0)

    def stream(self, lines: list[tuple[int, str]]) -> None:
        for number, line in lines:
            self.line(number, line)
        self.finish()

    def finish(self) -> None:
        """The records of the run so far; then the next one."""
        run = self.run
        if run.rows:
            self.reading.records += self.records(run)
        self.run = _Run(run.number + bool(run.rows), ours=run.ours, versions=run.versions)
        if run.ours is not None:  # commkit describes the world once for all its tables
            self.run.ranks, self.run.more, self.run.device = run.ranks, run.more, run.device

    def line(self, number: int, line: str) -> None:
        run = self.run
        if _FAILED.search(line):
            self.reading.notes.append(f"line {number}: the tool reported: {line.strip('# ')}")
        elif match := _OURS.search(line):
            run.ours = match
        elif match := _VERSIONS.search(line):
            self.again()
            self.run.versions = {"nccl-tests": match[1], "nccl": nccl_version(int(match[2]))}
        elif match := _STARTING.search(line):
            self.again()
            self.run.program = match[1]
        elif _PLAN.search(line):
            if run.plan:  # a version that does not say `starting`
                self.finish()
            self.run.plan = line
        elif match := _RANK.search(line):
            self.rank(number, match)
        elif match := _MORE.search(line):
            run.more = int(match[1])
        elif match := _BOUNDS.search(line):
            self.reading.out_of_bounds.append(int(match[1]))
        elif match := _AVERAGE.search(line):
            self.reading.averages.append(number_of(match[1]))
        elif (match := _PROGRAM.search(line)) and not run.rows:
            self.mentioned = match[1]
        else:
            self.table(number, line)

    def again(self) -> None:
        if self.run.rows:
            self.finish()

    def rank(self, number: int, match: re.Match[str]) -> None:
        key = int(match[2] or 0), int(match[1])
        if key in self.run.ranks:
            if self.run.rows:
                self.finish()
                self.run.ranks, self.run.more = {}, 0
            else:
                raise self.given.wrong(
                    number,
                    f"rank {key[1]} appears twice before the first row: several worlds wrote here "
                    "at the same time, often worlds of one rank that were to be one world; "
                    "expected one file a world, or lines tagged by rank (mpirun --tag-output)",
                )
        self.run.ranks[key] = match[3]
        self.run.device = self.run.device or re.sub(r"^\[[^\]]*\]\s*", "", match[4]).strip()

    def table(self, number: int, line: str) -> None:
        words = line.replace("#wrong", "wrong").lstrip("# ").split()
        if tuple(words[:3]) == _FIRST and {"time", "cputime"} & set(words):
            self.run.columns = _Columns.of(words)
            if self.run.columns is None:
                self.reading.notes.append(f"line {number}: not a header of nccl-tests: {line}")
            return
        if self.run.columns is None or len(words) < 5:
            return
        if not all(_COUNT.fullmatch(word) for word in words[:2]):
            return
        row = self.run.columns.row(words)
        if row is None:
            self.reading.notes.append(
                f"line {number}: left out: expected {self.run.columns.whole} columns, got "
                f"{len(words)}; cut, or another line was written into it"
            )
        else:
            self.run.rows.append((number, *row))

    # -- from rows to records

    def records(self, run: _Run) -> list[Measurement]:
        collective = self.collective(run)
        known, groups = self.counted(run)
        ranks = self.given.ranks or known or self.inferred(run, collective)
        hosts = len(set(run.ranks.values())) if known and not run.more else 0
        cpu = run.columns is not None and run.columns.cpu
        made = []
        for _, head, halves in run.rows:
            for half in halves:
                if half["time"] == "N/A":
                    continue
                made.append(
                    record(
                        tool="commkit" if run.ours else "nccl-tests",
                        collective=collective,
                        dtype=head["type"],
                        redop=head.get("redop", "none"),
                        root=int(head.get("root", -1)),
                        # A row with one half is of a run that has no out-of-place part.
                        in_place=half is halves[1] if len(halves) == 2 else True,
                        size=int(head["size"]),
                        count=int(head["count"]),
                        ranks=ranks,
                        hosts=hosts,
                        groups=groups,
                        backend=run.ours[3] if run.ours else "nccl",
                        device=run.ours[4] if run.ours else run.device or "cuda",
                        time_us=float(half["time"]),
                        time_is="median" if run.ours else "mean",
                        busbw=float(half["busbw"]),
                        iterations=run.planned(r"(?<!warmup )(?<!agg )\biters"),
                        warmup=run.planned("warmup ?[iI]ters"),
                        aggregated=run.planned("agg iters", 1),
                        mode="graph" if run.planned("graph") else "blocking",
                        clock="cpu-time" if cpu else "monotonic",
                        spread=_spread(half),
                        wrong=_wrong(half),
                        versions={"commkit": run.ours[1], "torch": run.ours[2]}
                        if run.ours
                        else run.versions,
                        run=identifier(self.text, run.number),
                        timestamp=self.given.changed,
                    )
                )
        return made

    def collective(self, run: _Run) -> str:
        name = self.given.collective or (run.program or self.mentioned).removesuffix("_perf")
        if not name:
            raise self.given.wrong(
                run.rows[0][0],
                "this version of nccl-tests does not print which collective it measured; "
                "expected --collective, such as --collective all_reduce",
            )
        return PROGRAMS.get(name, name)

    def counted(self, run: _Run) -> tuple[int, int]:
        """(ranks of the first group or 0 where lines are missing, number of groups)."""
        of_group: dict[int, int] = {}
        for group, _ in run.ranks:
            of_group[group] = of_group.get(group, 0) + 1
        whole = {rank for _, rank in run.ranks} == set(range(len(run.ranks)))
        if not of_group or not whole:
            return 0, 1
        return next(iter(of_group.values())) + run.more, len(of_group)

    def inferred(self, run: _Run, collective: str) -> int:
        """From busbw over algbw, where the lines of the ranks are missing."""
        measured = [half for row in run.rows for half in row[2] if half["time"] != "N/A"]
        best = max(measured, key=lambda half: float(half["busbw"]), default=_NOTHING)
        ranks = ranks_behind(collective, float(best["algbw"]), float(best["busbw"]))
        said = f"{ranks} ranks, from busbw over algbw" if ranks else "their number is not known"
        self.reading.notes.append(f"line {run.rows[0][0]}: no lines of ranks above: {said}")
        return ranks


def _numbers(half: dict[str, str]) -> bool:
    """Numbers all, but for what was not verified, is not known, or a half that was not run."""
    optional = {name for name in half if name not in ("time", "algbw", "busbw")}
    if half["time"] == "N/A":
        optional = set(half)
    try:
        for name, text in half.items():
            if name not in optional or text not in ("N/A", "-"):
                number_of(text)
    except ValueError:
        return False
    return True


def _wrong(half: dict[str, str]) -> int | None:
    """The old column `error` is a relative difference, not a number of elements."""
    text = half.get("wrong", "N/A")
    return None if text in ("N/A", "-") else int(float(text))


def _spread(half: dict[str, str]) -> Spread:
    if "i_min" not in half:
        return Spread()

    def value(name: str) -> float | None:
        return None if half[name] == "-" else float(half[name])

    cv = value("i_cv%")
    return Spread(
        minimum=value("i_min"),
        maximum=value("i_max"),
        p99=value("i_p99"),
        cv=None if cv is None else cv / 100,
    )


def nccl_version(code: int) -> str:
    """22803 -> 2.28.3; before 2.9 with one digit a part: 2804 -> 2.8.4."""
    if code < 10_000:
        return f"{code // 1000}.{code // 100 % 10}.{code % 100}"
    return f"{code // 10_000}.{code // 100 % 100}.{code % 100}"
