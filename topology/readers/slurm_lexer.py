"""The lines of slurm.conf-like files, as Slurm's own parser takes them apart.

In Slurm's order: a comment is cut off first (`\\#` is a literal #), then an odd number of trailing
backslashes continues the line (blanks after them do not count), then escapes are taken away.  Keys
compare without case; a value is quoted or ends at a blank; blanks around = are fine.
Slurm: src/common/parse_config.c; compared with Slurm 22.05 in tests/recorded/topology.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from commkit.errors import TopologyError
from commkit.topology.readers.source import Source

_PAIR = re.compile(r'\s*([A-Za-z0-9_.]+)\s*[-*+/]?=\s*(?:"([^"]*)"|(\S+))(?=\s|\Z)', re.ASCII)
_BLANK = " \t\n\v\f\r"


@dataclass(frozen=True, slots=True)
class Pair:
    """One key=value; `at` and `value_at` are offsets into the file."""

    key: str  #: lower case
    written: str
    value: str
    at: int
    value_at: int


@dataclass(frozen=True, slots=True)
class Line:
    """A line after joining and stripping; `where[i]` is the offset of its i-th character."""

    text: str
    where: tuple[int, ...]

    def offset(self, index: int) -> int:
        return self.where[min(index, len(self.where) - 1)]


def lines(text: str) -> Iterator[Line]:
    """Logical lines with anything in them."""
    kept: list[str] = []
    where: list[int] = []
    start = 0
    while start < len(text):
        end = text.find("\n", start) + 1 or len(text)
        raw = _without_comment(text[start:end])
        cut = _continued(raw)
        part = raw if cut < 0 else raw[:cut]
        kept.append(part)
        where += range(start, start + len(part))
        start = end
        if cut >= 0 and start < len(text):
            continue
        line = _without_escapes("".join(kept), where)
        if line.text.strip(_BLANK):
            yield line
        kept, where = [], []


def pairs(line: Line, source: Source) -> list[Pair]:
    """All key=value pairs of a line; a TopologyError names what is not one."""
    found: list[Pair] = []
    at = 0
    while match := _PAIR.match(line.text, at):
        group = 2 if match[2] is not None else 3
        found.append(
            Pair(
                match[1].lower(),
                match[1],
                match[group],
                line.offset(match.start(1)),
                line.offset(match.start(group)),
            )
        )
        at = match.end()
    rest = line.text[at:].strip(_BLANK)
    if rest:
        at += len(line.text[at:]) - len(line.text[at:].lstrip(_BLANK))
        raise unexpected(source, line.offset(at), rest)
    return found


def unexpected(source: Source, offset: int, text: str) -> TopologyError:
    shown = text if len(text) <= 40 else text[:37] + "..."
    return source.error(offset, f"{shown!r}: expected Key=value")


def _without_comment(line: str) -> str:
    escapes = 0
    for i, char in enumerate(line):
        if char == "#" and escapes % 2 == 0:
            return line[:i]
        escapes = escapes + 1 if char == "\\" else 0
    return line


def _continued(line: str) -> int:
    """Where the backslash is that continues the line, -1 if it ends here."""
    bare = line.rstrip(_BLANK)
    backslashes = len(bare) - len(bare.rstrip("\\"))
    return len(bare) - 1 if backslashes % 2 else -1


def _without_escapes(text: str, where: list[int]) -> Line:
    if "\\" not in text:
        return Line(text, tuple(where))
    kept: list[int] = []
    i = 0
    while i < len(text):
        i += text[i] == "\\"
        if i < len(text):
            kept.append(i)
        i += 1
    return Line("".join(text[i] for i in kept), tuple(where[i] for i in kept))
