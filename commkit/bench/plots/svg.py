"""A chart as SVG.  Each point and cell carries its text as a title, which browsers show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from commkit.bench.plots.axes import Scale, around, number_name, size_name
from commkit.bench.plots.charts import Chart, Lines, Matrix

WIDTH, HEIGHT = 640, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 12, 44
#: Okabe and Ito's colours, which most people with a colour vision deficiency tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#000000")
DASHES = ("", "6 3", "2 3")
#: From good to bad.
_GOOD, _MIDDLE, _BAD = (0x00, 0x72, 0xB2), (0xF7, 0xF7, 0xF7), (0xD5, 0x5E, 0x00)
#: Cells are named and numbered up to this many in a row or column.
NAMED = 17


def draw(chart: Chart) -> str:
    return _lines(chart) if isinstance(chart, Lines) else _matrix(chart)


def colour(number: int) -> tuple[str, str]:
    """(colour, dashes) of the series `number`; dashes change when the colours are used up."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def heat(value: float, low: float, high: float, high_is_bad: bool) -> str:
    """Blue is good, orange is bad; cells that are all alike are pale."""
    share = 0.5 if high <= low else (value - low) / (high - low)
    if not high_is_bad:
        share = 1 - share
    ends = (_GOOD, _MIDDLE) if share < 0.5 else (_MIDDLE, _BAD)
    part = 2 * share if share < 0.5 else 2 * share - 1
    mixed = (round(a + (b - a) * part) for a, b in zip(*ends, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def is_dark(value: float, low: float, high: float) -> bool:
    """On the darkest cells only white can be read."""
    return high > low and abs((value - low) / (high - low) - 0.5) > 0.33


def _begin(chart: Chart, height: int) -> str:
    return (
        f'<svg id="{escape(chart.name)}" class="plot" role="img" viewBox="0 0 {WIDTH} {height}" '
        f'xmlns="http://www.w3.org/2000/svg" aria-label="{escape(chart.title)}">'
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _labels(chart: Chart, height: int) -> list[str]:
    middle = (_TOP + height - _BOTTOM) / 2
    turned = f' transform="rotate(-90 14 {middle:.1f})"'
    return [
        _text((_LEFT + WIDTH - _RIGHT) / 2, height - 6, chart.x_label),
        _text(14, middle, chart.y_label, more=turned),
    ]


def _lines(chart: Lines) -> str:
    points = [point for series in chart.series for point in series.points]
    x = around((point.x for point in points), _LEFT, WIDTH - _RIGHT)
    y = around((point.y for point in points), HEIGHT - _BOTTOM, _TOP)
    parts = [_begin(chart, HEIGHT), *_grid(x, y), *_labels(chart, HEIGHT)]
    for number, series in enumerate(chart.series):
        stroke, dashes = colour(number)
        dashes = "4 4" if series.dashed else dashes
        parts.append(f'<g data-series="{number}" stroke="{stroke}" fill="{stroke}">')
        path = " ".join(
            f"{'ML'[place > 0]}{x.place(point.x):.1f} {y.place(point.y):.1f}"
            for place, point in enumerate(series.points)
        )
        style = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.append(f'<path class="line" d="{path}" fill="none" stroke-width="2"{style}/>')
        for point in series.points:
            parts.append(
                f'<circle class="point" cx="{x.place(point.x):.1f}" cy="{y.place(point.y):.1f}" '
                f'r="{2 if series.dashed else 3.5}"><title>{escape(point.text)}</title></circle>'
            )
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def _grid(x: Scale, y: Scale) -> list[str]:
    parts = []
    for tick in x.ticks(2):
        at = x.place(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>')
        parts.append(_text(at, HEIGHT - _BOTTOM + 16, size_name(tick), more=' class="tick"'))
    for tick in y.ticks(10):
        at = y.place(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, at + 4, number_name(tick), "end", ' class="tick"'))
    return parts


def _matrix(chart: Matrix) -> str:
    count = max(1, len(chart.rows))
    deep = min(26.0, max(6.0, 420 / count))
    height = round(_TOP + deep * count + _BOTTOM)
    wide = (WIDTH - _LEFT - _RIGHT) / max(1, len(chart.columns))
    low, high = chart.limits()
    parts = [_begin(chart, height), *_labels(chart, height)]
    numbered = len(chart.columns) <= NAMED and deep >= 12
    for row, (cells, texts) in enumerate(zip(chart.cells, chart.texts, strict=True)):
        top = _TOP + row * deep
        for column, (value, text) in enumerate(zip(cells, texts, strict=True)):
            left = _LEFT + column * wide
            fill = "none" if value is None else heat(value, low, high, chart.high_is_bad)
            parts.append(
                f'<rect class="cell" x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" '
                f'height="{deep:.1f}" fill="{fill}"><title>{escape(text)}</title></rect>'
            )
            if numbered and value is not None:
                dark = ' style="fill:#fff"' if is_dark(value, low, high) else ""
                more = f' class="number"{dark}'
                middle = left + wide / 2
                parts.append(_text(middle, top + deep / 2 + 3.5, number_name(value), more=more))
    parts += _names(chart.rows, lambda i: (_LEFT - 6, _TOP + (i + 0.5) * deep + 4), "end")
    bottom = height - _BOTTOM + 16
    parts += _names(chart.columns, lambda i: (_LEFT + (i + 0.5) * wide, bottom), "middle")
    return "".join([*parts, "</svg>"])


def _names(
    names: Sequence[str], place: Callable[[int], tuple[float, float]], anchor: str
) -> list[str]:
    step = max(1, -(-len(names) // NAMED))
    return [
        _text(*place(index), names[index], anchor, ' class="tick"')
        for index in range(0, len(names), step)
    ]
