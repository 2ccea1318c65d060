"""Charts as one PNG, two in a row.  Needs matplotlib (commkit[draw])."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from commkit.bench.plots.axes import around, number_name, size_name
from commkit.bench.plots.charts import Chart, Lines, Matrix
from commkit.bench.plots.svg import NAMED, colour, heat, is_dark
from commkit.errors import UsageError


def save(charts: Sequence[Chart], path: str, title: str) -> None:
    """Raises UsageError without matplotlib or a writable path."""
    try:
        module: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError(
            f"{path}: pictures need matplotlib: pip install matplotlib, or commkit[draw]; "
            "an .html page needs nothing"
        ) from error
    across = min(2, len(charts))
    down = -(-len(charts) // across)
    figure = module.Figure(figsize=(7 * across, 4.2 * down + 0.4), layout="constrained")
    figure.suptitle(_plain(title), fontsize=12)
    grid = figure.subplots(down, across, squeeze=False)
    places = [axes for row in grid for axes in row]
    for axes, chart in zip(places, charts, strict=False):
        axes.set_title(_plain(chart.title), fontsize=10)
        axes.set_xlabel(_plain(chart.x_label))
        axes.set_ylabel(_plain(chart.y_label))
        if isinstance(chart, Lines):
            _lines(axes, chart)
        else:
            _matrix(axes, chart)
    for axes in places[len(charts) :]:
        axes.set_axis_off()
    try:
        # Nothing of the moment goes into the file.
        figure.savefig(path, format="png", dpi=120, metadata={"Software": None})
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: expected a file to write") from None


def _plain(text: str) -> str:
    """A dollar sign would begin a formula."""
    return text.replace("$", r"\$")


def _lines(axes: Any, chart: Lines) -> None:
    for number, series in enumerate(chart.series):
        stroke, dashes = colour(number)
        axes.plot(
            [point.x for point in series.points],
            [point.y for point in series.points],
            color=stroke,
            linestyle="--" if series.dashed or dashes else "-",
            marker=None if series.dashed else "o",
            markersize=3.5,
            label=_plain(series.name),
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    x = around((point.x for series in chart.series for point in series.points), 0, 1)
    y = around((point.y for series in chart.series for point in series.points), 0, 1)
    axes.set_xlim(x.low, x.high)
    axes.set_ylim(y.low, y.high)
    axes.set_xticks(x.ticks(2), [size_name(tick) for tick in x.ticks(2)], fontsize=7)
    axes.set_yticks(y.ticks(10), [number_name(tick) for tick in y.ticks(10)], fontsize=7)
    axes.minorticks_off()
    axes.grid(color="#d8dee4")
    axes.legend(fontsize=7)


def _matrix(axes: Any, chart: Matrix) -> None:
    low, high = chart.limits()
    pixels = [
        [
            _channels("#ffffff" if value is None else heat(value, low, high, chart.high_is_bad))
            for value in row
        ]
        for row in chart.cells
    ]
    axes.imshow(pixels, aspect="auto", interpolation="nearest")
    if len(chart.columns) <= NAMED and len(chart.rows) <= 2 * NAMED:
        for row, values in enumerate(chart.cells):
            for column, value in enumerate(values):
                if value is not None:
                    axes.text(
                        column,
                        row,
                        number_name(value),
                        ha="center",
                        va="center",
                        fontsize=6,
                        color="white" if is_dark(value, low, high) else "black",
                    )
    for setter, names in ((axes.set_xticks, chart.columns), (axes.set_yticks, chart.rows)):
        step = max(1, -(-len(names) // NAMED))
        places = range(0, len(names), step)
        setter(list(places), [_plain(names[place]) for place in places], fontsize=7)


def _channels(text: str) -> tuple[float, ...]:
    return tuple(int(text[i : i + 2], 16) / 255 for i in (1, 3, 5))
