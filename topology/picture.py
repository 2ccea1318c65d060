"""A fabric as SVG or PNG: switches in rows by layer, the hosts below, cables in between.

Needs matplotlib (commkit[draw]).
"""

from __future__ import annotations

import importlib
from typing import Any

from commkit.errors import UsageError
from commkit.topology.draw import summary
from commkit.topology.fabric import Fabric
from commkit.topology.readers.source import printable

#: With more hosts than this, those of one group of leaves are one box.
MAX_SINGLE = 96
#: Names are written where a row has room for them.
MAX_NAMED = 40
_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")


def save(fabric: Fabric, path: str, kind: str) -> None:
    """Write `kind` ("svg" or "png").  Raises UsageError without matplotlib or a writable path."""
    try:
        module: Any = importlib.import_module("matplotlib.figure")
        collections: Any = importlib.import_module("matplotlib.collections")
        base: Any = importlib.import_module("matplotlib")
    except ImportError as error:
        raise UsageError(
            "pictures need matplotlib: pip install matplotlib, or commkit[draw]"
        ) from error
    rows, lines = layout(fabric)
    widest = max((len(row) for row in rows), default=1)
    figure = module.Figure(figsize=(min(max(6.0, widest * 0.45), 60.0), 1.6 + 1.5 * len(rows)))
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.9))
    axes.set_axis_off()
    axes.set_title(printable(summary(fabric)), fontsize=9, parse_math=False)
    if lines:
        segments = [line[0] for line in lines]
        widths = [line[1] for line in lines]
        axes.add_collection(
            collections.LineCollection(segments, linewidths=widths, colors="#999999", zorder=1)
        )
    for number, row in enumerate(rows):
        size = max(4.0, min(60.0, 1500.0 / max(len(row), 1)))
        axes.scatter(
            [x for x, _, _ in row],
            [y for _, y, _ in row],
            s=size,
            marker="s",
            c=_COLOURS[number % len(_COLOURS)],
            zorder=2,
        )
        if len(row) <= MAX_NAMED:
            for x, y, name in row:
                axes.annotate(
                    printable(name),
                    (x, y),
                    (0, -8 if number == 0 else 7),
                    textcoords="offset points",
                    ha="center",
                    va="top" if number == 0 else "bottom",
                    fontsize=6,
                    parse_math=False,  # a name may hold $
                )
    axes.autoscale_view()
    axes.margins(0.05, 0.15)
    try:
        # Nothing of the moment goes into the file: the same fabric gives the same bytes.
        with base.rc_context({"svg.hashsalt": "commkit"}):
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(path, format=kind, dpi=150, metadata=metadata)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: expected a file to write") from None


Point = tuple[float, float, str]
Cable = tuple[tuple[tuple[float, float], tuple[float, float]], float]


def layout(fabric: Fabric) -> tuple[list[list[Point]], list[Cable]]:
    """(x, y, name), row by row from the hosts up, and ((from, to), width) of the cables."""
    order = fabric.order()
    boxes: list[list[int]] = [[i] for i in order]
    if len(order) > MAX_SINGLE and fabric.switches:
        near = fabric.levels()[0].group
        merged: dict[int, list[int]] = {}
        for i in order:
            merged.setdefault(near[i], []).append(i)
        boxes = list(merged.values())
    host_x: dict[int, float] = {}
    bottom: list[Point] = []
    for place, box in enumerate(boxes):
        name = fabric.hosts[box[0]].name
        bottom.append((float(place), 0.0, name if len(box) == 1 else f"{len(box)} hosts"))
        host_x.update(dict.fromkeys(box, float(place)))
    width = float(max(len(boxes) - 1, 1))
    x: dict[int, float] = {}
    rows = [bottom]
    for layer in range(fabric.depth):
        members = [i for i, switch in enumerate(fabric.switches) if switch.layer == layer]
        wished = {i: _middle(fabric, i, x, host_x, width) for i in members}
        members.sort(key=lambda i: (wished[i], i))
        for place, i in enumerate(members):
            x[i] = width * (place + 0.5) / len(members)
        rows.append([(x[i], layer + 1.0, fabric.switches[i].name) for i in members])
    lines: dict[tuple[tuple[float, float], tuple[float, float]], float] = {}
    for i, host in enumerate(fabric.hosts):
        for nic in host.nics:
            if nic.switch is not None:
                top = x[nic.switch], fabric.switches[nic.switch].layer + 1.0
                lines[(host_x[i], 0.0), top] = 0.6
    for link in fabric.links:
        ends = [(x[s], fabric.switches[s].layer + 1.0) for s in (link.a, link.b)]
        lines[ends[0], ends[1]] = min(0.4 + 0.2 * (link.count or 1), 3.0)
    return rows, list(lines.items())


def _middle(
    fabric: Fabric, switch: int, x: dict[int, float], host_x: dict[int, float], width: float
) -> float:
    """Where a switch stands best: amid what is below it."""
    below = [x[s] for s in fabric.neighbours[switch] if s in x]
    below += [host_x[i] for i in fabric.attached[switch]]
    return sum(below) / len(below) if below else width
