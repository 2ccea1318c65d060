"""Charts as one HTML page: no other file, no network, readable without scripts.

The page's own policy forbids every request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from commkit.bench.formats.table import lines as table_lines
from commkit.bench.plots.charts import Chart, Lines, Matrix
from commkit.bench.plots.results import Source
from commkit.bench.plots.svg import colour, draw
from commkit.records import Measurement
from commkit.version import VERSION

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1380px; padding: 16px;
  color: #1b1f23; background: #fff; }
h1 { font-size: 22px; margin: 4px 0; } h2 { font-size: 16px; margin: 0 0 6px; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr));
  gap: 18px; margin: 16px 0; }
section { border: 1px solid #d0d7de; border-radius: 6px; padding: 12px; min-width: 0; }
svg.plot { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: #1b1f23; }
svg text.tick, svg text.number { font-size: 10.5px; }
svg text.number { pointer-events: none; }
svg .grid { stroke: #d8dee4; stroke-width: 1; } svg .cell { stroke: #fff; stroke-width: 0.5; }
svg .hidden { display: none; }
.legend { list-style: none; margin: 6px 0 0; padding: 0; display: flex; flex-wrap: wrap;
  gap: 2px 14px; }
.legend button { font: inherit; font-size: 13px; border: 0; background: none; padding: 0;
  cursor: pointer; }
.legend button[aria-pressed="false"] { opacity: 0.4; text-decoration: line-through; }
.legend i { display: inline-block; width: 22px; border-top: 3px solid; margin-right: 5px;
  vertical-align: middle; }
p.note { font-size: 13px; color: #57606a; margin: 6px 0 0; }
pre { overflow-x: auto; font-size: 12px; } table { border-collapse: collapse; }
td { padding: 1px 14px 1px 0; vertical-align: top; }
"""
_SCRIPT = """
"use strict";
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    const plot = document.getElementById(button.dataset.plot);
    plot.querySelector(`[data-series="${button.dataset.series}"]`).classList.toggle("hidden", !on);
  });
}
document.documentElement.dataset.plots = String(document.querySelectorAll("svg.plot").length);
"""


def page(sources: Sequence[Source], charts: Sequence[Chart], title: str) -> str:
    records = [record for _, found in sources for record in found]
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(_summary(records))}</p>",
        "<main>",
        *map(_section, charts),
        "</main>",
        "<details open><summary>Versions and settings</summary>",
        _facts(records),
        "</details>",
        "<details><summary>Rows</summary><pre>",
        escape("\n".join(table_lines(records, wide=True))),
        "</pre></details>",
        f"<p class=note>commkit {escape(VERSION)}</p>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # An icon of its own, or browsers ask a server for one.
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>"
        + "\n".join(body)
        + f"\n<script>{_SCRIPT}</script></body></html>\n"
    )


def _summary(records: Sequence[Measurement]) -> str:
    worlds = sorted({record.world_size for record in records})
    names = list(dict.fromkeys(record.collective for record in records))
    parts = [
        f"{len(records)} rows",
        ", ".join(names[:12]),
        " or ".join(str(world or "?") for world in worlds[:6]) + " ranks",
        ", ".join(sorted({record.backend for record in records} - {""})),
        ", ".join(sorted({record.device for record in records} - {""})),
    ]
    wrong = sum(1 for record in records if record.wrong)
    if wrong:
        parts.append(f"WRONG DATA in {wrong} rows")
    hosts = {record.hosts for record in records}
    if hosts == {1} and worlds != [1]:
        parts.append("all ranks on one host: no network was measured")
    return "; ".join(filter(None, parts))


def _section(chart: Chart) -> str:
    parts = [f"<section><h2>{escape(chart.title)}</h2>", draw(chart)]
    if isinstance(chart, Lines):
        parts.append(_legend(chart))
    else:
        parts.append(_key(chart))
    if chart.note:
        parts.append(f"<p class=note>{escape(chart.note)}</p>")
    return "".join([*parts, "</section>"])


def _legend(chart: Lines) -> str:
    items = []
    for number, series in enumerate(chart.series):
        stroke, dashes = colour(number)
        style = "dashed" if series.dashed or dashes else "solid"
        items.append(
            f'<li><button type="button" aria-pressed="true" data-plot="{escape(chart.name)}" '
            f'data-series="{number}"><i style="border-color:{stroke};border-top-style:{style}"></i>'
            f"{escape(series.name)}</button></li>"
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _key(chart: Matrix) -> str:
    values = [value for row in chart.cells for value in row if value is not None]
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    text = f"{low:.4g} ({chart.low}) to {high:.4g} ({chart.high}); blue is fast, orange is slow"
    return f"<p class=note>{escape(text)}</p>"


def _facts(records: Iterable[Measurement]) -> str:
    found: dict[str, set[str]] = {}
    for record in records:
        for name, value in {**record.versions, **record.environment}.items():
            found.setdefault(name, set()).add(value)
    rows = "".join(
        f"<tr><td>{escape(name)}<td>{escape(' or '.join(sorted(values)))}"
        for name, values in sorted(found.items())
    )
    return f"<table>{rows}</table>" if rows else "<p>none recorded</p>"
