"""What a chart is, whoever draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    text: str  # what a reader is told about it


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]
    dashed: bool = False  # a bound, not a measurement


@dataclass(frozen=True, slots=True)
class Lines:
    """Both axes are logarithmic: every x and y is above 0.  x is in bytes."""

    name: str  # an identifier, unique in a page
    title: str
    y_label: str
    series: Sequence[Series]
    note: str = ""
    x_label: str = "size (bytes)"


@dataclass(frozen=True, slots=True)
class Matrix:
    """Cells by row and column; None: not measured."""

    name: str
    title: str
    x_label: str
    y_label: str
    columns: Sequence[str]
    rows: Sequence[str]
    cells: Sequence[Sequence[float | None]]
    texts: Sequence[Sequence[str]] = field(repr=False)
    low: str  # what the lowest value means: `fast`, `slow`
    high: str
    high_is_bad: bool = True
    centre: float | None = None  # the value that is neither good nor bad; None: amid the others
    note: str = ""

    def limits(self) -> tuple[float, float]:
        """Of the colours."""
        values = [value for row in self.cells for value in row if value is not None]
        if not values:
            return 0.0, 1.0
        if self.centre is None:
            return min(values), max(values)
        reach = max(abs(value - self.centre) for value in values)
        return self.centre - reach, self.centre + reach


Chart = Lines | Matrix
