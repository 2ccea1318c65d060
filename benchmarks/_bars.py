"""What every benchmark shares: --bars, --json FILE, --quick, and how a bar is judged.

    bars = Bars("init", "Start-up of a world beside stock torch.")
    options = bars.parse()
    ...
    bars.keep(ranks=64, seconds=took, how="real processes")
    bars.check("connections_at_root", peak, "<=", 12)
    sys.exit(bars.finish())

A bar is a promise: with --bars the run ends with one line for each,

    BAR <name> <value> <op> <bound> ok|short

and status 1 if any is short.  Bars compare counters or ratios: seconds depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    op: str
    bound: float

    @property
    def holds(self) -> bool:
        """nan holds against nothing."""
        return _OPERATORS[self.op](self.value, self.bound)

    def line(self) -> str:
        verdict = "ok" if self.holds else "short"
        return f"BAR {self.name} {_text(self.value)} {self.op} {_text(self.bound)} {verdict}"


def _text(value: float) -> str:
    # Integers in full: a counter of 12288 is not 1.229e+04.
    whole = math.isfinite(value) and value == int(value) and abs(value) < 2**53
    return str(int(value)) if whole else f"{value:.4g}"


class Bars:
    """One benchmark's flags, records and bars."""

    def __init__(self, name: str, description: str) -> None:
        self.name = name
        self.parser = argparse.ArgumentParser(description=description)
        self.parser.add_argument(
            "--bars", action="store_true", help="run what the bars need; status 1 if one is short"
        )
        self.parser.add_argument("--json", metavar="FILE", help="append the records (JSON lines)")
        self.parser.add_argument(
            "--quick", action="store_true", help="a smoke run: small worlds, few repetitions"
        )
        self._file: IO[str] | None = None
        self._bars: dict[str, Bar] = {}
        self._asked = False

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The options; `parser` takes a benchmark's own ones before.  A file that cannot be
        written is refused now, not after an hour."""
        options = self.parser.parse_args(argv)
        self._asked = options.bars
        if options.json:
            try:
                self._file = open(options.json, "a", encoding="utf-8")  # noqa: SIM115 - finish
            except OSError as error:
                self.parser.error(f"--json {options.json}: {error.strerror}")
        return options

    def keep(self, **values: Any) -> dict[str, Any]:
        """Append one record, with the benchmark's name, time, machine and versions; returns it."""
        record = {
            "benchmark": self.name,
            "timestamp": round(time.time(), 3),
            "machine": machine(),
            "versions": versions(),
            **values,
        }
        if self._file is not None:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        return record

    def check(self, name: str, value: float, op: str, bound: float) -> bool:
        """Judge a bar and remember it for the end; True if it holds.

        Raises ValueError for an unknown operator, a name with spaces or one that was judged.
        """
        if op not in _OPERATORS:
            raise ValueError(f"bar {name}: operator {op!r}: expected {' '.join(_OPERATORS)}")
        if not re.fullmatch(r"\S+", name):
            raise ValueError(f"bar {name!r}: expected a name without spaces")
        if name in self._bars:
            raise ValueError(f"bar {name}: judged twice")
        bar = Bar(name, float(value), op, float(bound))
        self._bars[name] = bar
        return bar.holds

    def finish(self) -> int:
        """Print the bars if they were asked for; the process's exit status.

        Raises RuntimeError if --bars was given and nothing was judged: that is no success.
        """
        if self._file is not None:
            self._file.close()
            self._file = None
        if not self._asked:
            return 0
        if not self._bars:
            raise RuntimeError(f"{self.name}: --bars, but no bar was judged")
        sys.stdout.flush()
        for bar in self._bars.values():
            print(bar.line(), flush=True)
        return 0 if all(bar.holds for bar in self._bars.values()) else 1


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """Slope of the least-squares line through the logarithms; nan for fewer than two points."""
    if len(points) < 2:
        return math.nan
    xs, ys = [math.log(x) for x, _ in points], [math.log(max(y, 1)) for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    top = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return top / sum((x - mean_x) ** 2 for x in xs)


def machine() -> dict[str, Any]:
    """Where a number comes from: without it a number means little."""
    return {
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Of Python and of what this process has imported."""
    found = {"python": platform.python_version()}
    for name in ("commkit", "torch"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = str(getattr(module, "__version__", "unknown"))
    return found
