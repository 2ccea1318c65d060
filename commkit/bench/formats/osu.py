"""OSU micro-benchmarks (MPI, versions 4 to 7): blocking collectives, latency, bandwidth.

OSU prints no number of ranks.  For the collectives that divide data its size is one rank's part,
here it is the whole, so the number has to be given.  Its MB are 1e6 bytes.
"""

from __future__ import annotations

import re

from commkit.bench.formats.lines import streams
from commkit.bench.formats.reading import Given, Reading, Spread, identifier, record
from commkit.bench.formats.reading import number as number_of
from commkit.bench.formats.reading import size as size_of

#: (what is measured, device, title, version); the title of the latency test is empty.
_TITLE = re.compile(r"OSU (\S+?)(?:-(\w+))? (?:(\S.*?) )?(?:[Ll]atency )?Test v(\S+)")
#: Title -> (collective, the size is one rank's part)
_TESTS = {
    "Allreduce": ("all_reduce", False),
    "Allgather": ("all_gather", True),
    "Allgatherv": ("all_gather", True),
    "All-to-All Personalized Exchange": ("all_to_all", True),
    "All-to-Allv Personalized Exchange": ("all_to_all", True),
    "Broadcast": ("broadcast", False),
    "Reduce": ("reduce", False),
    "Reduce_scatter": ("reduce_scatter", False),
    "Gather": ("gather", True),
    "Scatter": ("scatter", True),
    "Barrier": ("barrier", False),
    "Latency": ("ping_pong", False),
    "Multi": ("ping_pong", False),
    "Bandwidth": ("stream", False),
    "Bi-Directional Bandwidth": ("stream_both", False),
}
_PAIR = ("ping_pong", "stream", "stream_both")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")


def looks_like(text: str) -> bool:
    return _TITLE.search(text) is not None


def read(text: str, given: Given) -> Reading:
    """Raises UsageError where --ranks is needed.  Tests that are not read are noted."""
    reading = Reading("OSU", [])
    for stream in streams(text):
        _Parser(text, given, reading).stream(stream)
    if not reading.records:
        reading.notes.append("no rows")
    return reading


class _Parser:
    def __init__(self, text: str, given: Given, reading: Reading) -> None:
        self.text, self.given, self.reading = text, given, reading
        self.title, self.collective, self.device, self.version = "", "", "", ""
        self.each = False
        self.columns: list[str] = []
        self.sections = 0

    def stream(self, lines: list[tuple[int, str]]) -> None:
        for number, line in lines:
            if match := _TITLE.search(line):
                self.collective, self.columns = "", []
                title = match[3] or "Latency"
                if match[1] not in ("MPI", "NCCL") or title not in _TESTS:
                    self.reading.notes.append(f"line {number}: not read: {line.strip('# ')}")
                else:
                    self.begin(number, *_TESTS[title], match[2], match[4])
            elif self.collective and re.match(r"[#\s]*(?:Size\s+\S|Avg Latency)", line):
                self.columns = re.split(r"\s{2,}", line.strip("# \n").replace("(us) ", "(us)  "))
            elif self.columns and re.match(r"\s*\d", line):
                self.row(number, line.split())

    def begin(
        self, number: int, collective: str, each: bool, device: str | None, version: str
    ) -> None:
        self.sections += 1
        self.collective, self.each, self.version = collective, each, version
        self.device = "cpu" if device is None else device.lower()
        self.columns = []
        if each and not self.given.ranks:
            raise self.given.wrong(
                number,
                f"OSU's size of {collective} is one rank's part, and it prints no number of ranks: "
                "expected --ranks N",
            )

    def row(self, number: int, words: list[str]) -> None:
        try:
            if len(words) < len(self.columns):
                raise ValueError
            cells = dict(zip(self.columns, words, strict=False))
            size = size_of(cells.get("Size", "0"))
            numbers = {
                name: number_of(text.replace(",", ""))
                for name, text in cells.items()
                if name not in ("Size", "Validation")
            }
        except ValueError:
            self.reading.notes.append(
                f"line {number}: left out: expected {len(self.columns)} columns "
                f"({', '.join(self.columns)}), got {len(words)} words"
            )
            return
        rate = numbers.get("Bandwidth (MB/s)")
        mean = numbers.get("Avg Latency(us)", numbers.get("Latency (us)"))
        slowest = numbers.get("Max Latency(us)")
        if rate is None and mean is None:
            raise self.given.wrong(number, f"no time among the columns {', '.join(self.columns)}")
        if rate is not None:
            time_us = size / rate if rate > 0 else 0.0
        else:
            time_us = slowest if slowest is not None else mean or 0.0
        validation = cells.get("Validation")
        if validation not in (None, "Pass"):
            self.reading.notes.append(f"line {number}: size {size}: validation says {validation}")
        pair = self.collective in _PAIR
        self.reading.records.append(
            record(
                tool="osu",
                collective=self.collective,
                dtype="int8",
                redop="sum" if self.collective in _REDUCING else "none",
                size=size * (self.given.ranks if self.each else 1),
                count=size,
                time_us=time_us,
                time_is="mean" if slowest is None else "slowest-mean",
                ranks=self.given.ranks or (2 if pair else 0),
                backend="mpi",
                device=self.device,
                iterations=int(numbers.get("Iterations", 0)),
                clock="monotonic",
                # Minimum and maximum are over ranks, not over iterations.
                spread=Spread(mean=mean),
                slowest=slowest,
                # It does not say how many are wrong: at least one.
                wrong={None: None, "Pass": 0}.get(validation, 1),
                versions={"osu": self.version},
                run=identifier(self.text, self.sections - 1),
                timestamp=self.given.changed,
                source=0 if pair else -1,
                peer=1 if pair else -1,
            )
        )
