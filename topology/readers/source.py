"""Text with positions: what every reader makes its errors with."""

from __future__ import annotations

import bisect
import functools
import importlib
from dataclasses import dataclass
from types import ModuleType

from commkit.errors import NoTopology, TopologyError, UsageError


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
        return TopologyError(f"{self.name}:{line}:{column}: {message}")

    def nothing(self, message: str) -> NoTopology:
        return NoTopology(f"{self.name}: no placement information: {message}")

    @property
    def stem(self) -> str:
        """The file's name without directory and ending, for files that do not name their host."""
        base = self.name.replace("\\", "/").rpartition("/")[2]
        return base.partition(".")[0] or base or "host"

    def lines(self) -> list[str]:
        """Lines without their ends, CRLF included."""
        return [line.removesuffix("\r") for line in self.text.split("\n")]


def load(module: str, package: str) -> ModuleType:
    """An optional library, or a TopologyError that names what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"reading this format needs {package}: pip install '{package}', or commkit[topology]"
        ) from error
