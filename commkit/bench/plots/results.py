"""From records to charts: bandwidth, time, percentiles, ranks, pairs, roofline."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from commkit.bench.formats.bandwidth import factor
from commkit.bench.formats.table import key_of
from commkit.bench.plots.axes import size_name
from commkit.bench.plots.charts import Chart, Lines, Matrix, Point, Series
from commkit.records import Measurement

#: More lines, or charts of one sort, than this are not to be told apart.
MOST_SERIES = 16
MOST_CHARTS = 6
#: More ranks than this are drawn in blocks, each with its slowest rank.
MOST_RANKS = 64

#: (what a file is called, its records)
Source = tuple[str, Sequence[Measurement]]
_Groups = dict[str, list[Measurement]]


def charts(sources: Sequence[Source], link: float | None = None) -> list[Chart]:
    """All charts that the records have something for.

    `link` is what one rank's link carries one way, in 1e9 bytes a second; without it, what the
    records say.
    """
    named = _named(sources)
    pairs = {name: group for name, group in named.items() if group[0].source >= 0}
    sweeps = {name: group for name, group in named.items() if group[0].source < 0}
    # A ping-pong over sizes is a line as others are; a matrix has many pairs.
    if _pair_count(pairs) == 1:
        sweeps, pairs = {**sweeps, **pairs}, {}
    found: list[Chart] = []
    found += _by_size(
        sweeps, "bandwidth", "Bus bandwidth by size", "busbw (GB/s)", lambda r: r.busbw_gbps
    )
    found += _by_size(sweeps, "time", "Time by size", "time (us)", lambda r: r.time_us)
    for make in (_roofline, _percentiles, _ranks):
        made = [chart for name, group in sweeps.items() for chart in make(name, group, link)]
        found += made[:MOST_CHARTS]
    found += _pairs(pairs)
    return found


def left_out(sources: Sequence[Source]) -> int:
    """How many lines the charts by size have no room for."""
    return max(0, len([g for g in _named(sources).values() if g[0].source < 0]) - MOST_SERIES)


def _pair_count(groups: _Groups) -> int:
    return len({(record.source, record.peer) for group in groups.values() for record in group})


def _named(sources: Sequence[Source]) -> _Groups:
    """Records by the name of their line: what all have in common is not in it."""
    groups: dict[tuple[object, ...], list[tuple[str, Measurement]]] = {}
    for label, records in sources:
        for record in records:
            key = (label, record.in_place, *key_of(record)[:4], *key_of(record)[5:])
            groups.setdefault(key, []).append((label, record))
    parts = {key: _parts(*members[0]) for key, members in groups.items()}
    kept = [
        position
        for position in range(9)
        if position == 0 or len({part[position] for part in parts.values()}) > 1
    ]
    named: _Groups = {}
    for key, members in groups.items():
        name = ", ".join(filter(None, (parts[key][position] for position in kept)))
        named.setdefault(name, []).extend(record for _, record in members)
    return {name: _merged(group) for name, group in named.items()}


def _parts(label: str, record: Measurement) -> tuple[str, ...]:
    return (
        record.collective,
        "in place" if record.in_place else "out of place",
        f"{record.world_size or '?'} ranks",
        record.dtype,
        record.redop if record.redop != "none" else "",
        record.group + (f" with {record.concurrent}" if record.concurrent else ""),
        record.mode if record.aggregated == 1 else f"{record.mode} {record.aggregated}",
        record.backend,
        label,
    )


def _merged(records: Sequence[Measurement]) -> list[Measurement]:
    """By size; of several runs the one with the median time."""
    by_size: dict[tuple[int, int, int], list[Measurement]] = {}
    for record in records:
        by_size.setdefault((record.source, record.peer, record.bytes), []).append(record)
    return [
        sorted(group, key=lambda record: record.time_us)[(len(group) - 1) // 2]
        for _, group in sorted(by_size.items())
    ]


def _line(
    name: str,
    records: Sequence[Measurement],
    value: Callable[[Measurement], float | None],
    unit: str,
) -> Series:
    points = []
    for record in records:
        y = value(record)
        if record.bytes > 0 and y is not None and y > 0:
            points.append(
                Point(record.bytes, y, f"{name}, {size_name(record.bytes)}: {y:.4g} {unit}")
            )
    return Series(name, points)


def _by_size(
    groups: _Groups,
    identifier: str,
    title: str,
    label: str,
    value: Callable[[Measurement], float | None],
) -> list[Chart]:
    unit = label.partition("(")[2].rstrip(")")
    series = [_line(name, group, value, unit) for name, group in groups.items()]
    series = [one for one in series if one.points]
    if not series:
        return []
    note = ""
    if len(series) > MOST_SERIES:
        note = f"{len(series) - MOST_SERIES} more lines are not drawn"
    return [Lines(identifier, title, label, series[:MOST_SERIES], note)]


def _percentiles(name: str, records: Sequence[Measurement], link: float | None) -> list[Chart]:
    if not all(record.p99_us is not None for record in records):
        return []
    lines = (
        ("minimum", lambda r: r.min_us),
        ("median" if records[0].time_is == "median" else "mean", lambda r: r.time_us),
        ("p95", lambda r: r.p95_us),
        ("p99", lambda r: r.p99_us),
        ("maximum", lambda r: r.max_us),
    )
    values: list[Series] = [_line(text, records, value, "us") for text, value in lines]
    series = [one for one in values if one.points]
    if not series:
        return []
    note = "over iterations; each is its slowest rank's"
    return [
        Lines(_identifier("percentiles", name), f"Percentiles: {name}", "time (us)", series, note)
    ]


def _roofline(name: str, records: Sequence[Measurement], link: float | None) -> list[Chart]:
    """min(link, what the shortest time of any size allows)."""
    measured = _line(name, records, lambda r: r.busbw_gbps, "GB/s")
    sized = [record for record in records if record.bytes > 0 and record.time_us > 0]
    speed = link or next(filter(None, map(_link_of, sized)), None)
    if speed is None or not measured.points:
        return []
    ratio = factor(records[0].collective, records[0].world_size) or 1.0
    shortest = min(record.time_us for record in sized)
    sizes = [point.x for point in measured.points]
    bend = speed * 1e3 * shortest / ratio
    places = sorted({*sizes, *([bend] if sizes[0] < bend < sizes[-1] else [])})
    roof = [min(speed, ratio * place / shortest / 1e3) for place in places]
    points = [
        Point(x, y, f"bound, {size_name(x)}: {y:.4g} GB/s")
        for x, y in zip(places, roof, strict=True)
    ]
    reached = max(point.y for point in measured.points)
    note = (
        f"bound: link speed {speed:g} GB/s, below {size_name(bend)} the shortest time of any size, "
        f"{shortest:.4g} us; the best row has {100 * reached / speed:.3g} % of the link"
    )
    if reached > speed:
        note += ": more than the link, as in-network reduction or ranks that share a host allow"
    series = [measured, Series("bound", points, dashed=True)]
    return [Lines(_identifier("roofline", name), f"Roofline: {name}", "busbw (GB/s)", series, note)]


def _link_of(record: Measurement) -> float | None:
    if not record.link_percent or not record.busbw_gbps:
        return None
    return 100 * record.busbw_gbps / record.link_percent


def _ranks(name: str, records: Sequence[Measurement], link: float | None) -> list[Chart]:
    """Each rank's median over the median of all ranks', by size."""
    known = [record for record in records if len(record.rank_times_us) > 1]
    if not known or len({len(record.rank_times_us) for record in known}) > 1:
        return []
    count = len(known[0].rank_times_us)
    block = -(-count // MOST_RANKS)
    rows, cells, texts = [], [], []
    for first in range(0, count, block):
        members = range(first, min(first + block, count))
        rows.append(str(first) if len(members) == 1 else f"{first}-{members[-1]}")
        line, told = [], []
        for record in known:
            middle = statistics.median(record.rank_times_us)
            rank = max(members, key=record.rank_times_us.__getitem__)
            time = record.rank_times_us[rank]
            line.append(time / middle if middle > 0 else None)
            told.append(f"rank {rank}, {size_name(record.bytes)}: {time:.4g} us")
        cells.append(line)
        texts.append(told)
    note = "each rank's own median, over the median of all ranks"
    if block > 1:
        note += f"; the slowest of each {block} ranks"
    return [
        Matrix(
            _identifier("ranks", name),
            f"Ranks: {name}",
            "size",
            "rank",
            [size_name(record.bytes) for record in known],
            rows,
            cells,
            texts,
            "fast",
            "slow",
            centre=1.0,
            note=note,
        )
    ]


def _pairs(groups: _Groups) -> list[Chart]:
    """The largest size as bandwidth, the smallest as latency."""
    found: list[Chart] = []
    for name, group in groups.items():
        sizes = sorted({record.bytes for record in group})
        ranks = sorted({rank for record in group for rank in (record.source, record.peer)})
        for size, what in ((sizes[-1], "bandwidth"), (sizes[0], "latency")):
            if what == "latency" and len(sizes) == 1 and size > 4096:
                continue
            if what == "bandwidth" and len(sizes) == 1 and size <= 4096:
                continue
            at = {(r.source, r.peer): r for r in group if r.bytes == size}
            # A pair that was measured one way only stands on both sides of the diagonal.
            at = {**{(b, a): r for (a, b), r in at.items()}, **at}
            cells: list[list[float | None]] = []
            texts: list[list[str]] = []
            for a in ranks:
                here = [at.get((a, b)) for b in ranks]
                if what == "bandwidth":
                    cells.append([None if r is None else r.algbw_gbps for r in here])
                else:
                    cells.append([None if r is None else r.time_us for r in here])
                unit = "GB/s" if what == "bandwidth" else "us"
                texts.append(
                    [
                        f"{a} to {b}: " + ("not measured" if v is None else f"{v:.4g} {unit}")
                        for b, v in zip(ranks, cells[-1], strict=True)
                    ]
                )
            bandwidth = what == "bandwidth"
            found.append(
                Matrix(
                    _identifier(f"pairs-{what}", name),
                    f"Pairs: {name}, {size_name(size)}, " + ("GB/s" if bandwidth else "us"),
                    "to rank",
                    "from rank",
                    [str(rank) for rank in ranks],
                    [str(rank) for rank in ranks],
                    cells,
                    texts,
                    "slow" if bandwidth else "fast",
                    "fast" if bandwidth else "slow",
                    high_is_bad=not bandwidth,
                )
            )
    return found[: 2 * MOST_CHARTS]


def _identifier(kind: str, name: str) -> str:
    return f"{kind}-" + "".join(c if c.isascii() and c.isalnum() else "-" for c in name)
