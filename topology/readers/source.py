"""Text with positions: what every reader makes its errors with."""

from __future__ import annotations

import bisect
import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from commkit.errors import NoTopology, TopologyError, UsageError

#: A fabric of 100,000 hosts is some 10 MB.
MAX_BYTES = 1 << 28


def printable(text: str) -> str:
    """What a file holds, fit for one line of a terminal: control characters as \\x1b."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@dataclass(frozen=True)
class Source:
    """A file's text and the name that errors call it by."""

    name: str
    text: str

    @functools.cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        while (at := self.text.find("\n", starts[-1])) >= 0:
            starts.append(at + 1)
        return starts

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column, both from 1, of a character."""
        line = bisect.bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def error(self, offset: int, message: str) -> TopologyError:
        return self.error_at(*self.position(offset), message)

    def error_at(self, line: int, column: int, message: str) -> TopologyError:
        return TopologyError(f"{self.name}:{line}:{column}: {printable(message)}")

    def nothing(self, message: str) -> NoTopology:
        return NoTopology(f"{self.name}: no placement information: {printable(message)}")

    @property
    def stem(self) -> str:
        """The file's name without directory and ending, for files that do not name their host."""
        base = self.name.replace("\\", "/").rpartition("/")[2]
        return base.partition(".")[0] or base or "host"

    def lines(self) -> list[str]:
        """Lines without their ends, CRLF included."""
        return [line.removesuffix("\r") for line in self.text.split("\n")]


def content(file: Path) -> str:
    """The text of a file; UsageError if it cannot be read, TopologyError if it is no text."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)  # a device or a pipe has no size to ask for
        if len(data) > MAX_BYTES:
            raise UsageError(f"{file}: expected a topology file, {MAX_BYTES} bytes at most")
        return data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}: expected a readable file") from None
    except UnicodeDecodeError as error:
        raise TopologyError(f"{file}: byte {error.start} is not UTF-8: expected text") from None


def load(module: str, package: str) -> ModuleType:
    """An optional library, or a TopologyError that names what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"reading this format needs {package}: pip install '{package}', or commkit[topology]"
        ) from error
