"""Charts of results: which there are, where their points are, and files of both sorts."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree

import pytest
from click.testing import CliRunner

from commkit import records
from commkit.bench.plots import axes, page, results, svg, write
from commkit.bench.plots.charts import Lines, Matrix
from commkit.cli.bench import command
from commkit.errors import UsageError
from tests.unit.bench_results import SIZES, pairs, sweep
from tests.unit.test_records import measurement

SVG = "{http://www.w3.org/2000/svg}"


def charts(*found, link=None):
    made = results.charts([("a.jsonl", [r for some in found for r in some])], link)
    assert len({chart.name for chart in made}) == len(made)
    return {chart.name: chart for chart in made}


def starting(made, kind):
    return [chart for name, chart in made.items() if name.startswith(kind)]


def test_a_sweep_has_a_chart_of_each_sort_and_no_roofline_without_a_link():
    made = charts(sweep())
    assert [name.split("-")[0] for name in made] == [
        "bandwidth",
        "time",
        *2 * ["percentiles"],
        *2 * ["ranks"],
    ]
    assert [len(s.points) for s in made["bandwidth"].series] == [len(SIZES)] * 2
    assert [s.name for s in made["bandwidth"].series] == [
        "all_reduce, out of place",
        "all_reduce, in place",
    ]


def test_only_what_differs_is_in_the_name_of_a_line():
    both = charts(sweep(), sweep(dtype="half", world_size=16))
    assert [s.name for s in both["time"].series] == [
        "all_reduce, out of place, float",
        "all_reduce, in place, float",
        "all_reduce, out of place, half",
        "all_reduce, in place, half",
    ]


def test_several_files_are_told_apart_and_runs_of_one_file_are_one_line():
    made = results.charts([("a", sweep()), ("b", sweep(scale=2.0))])
    assert [s.name for s in made[1].series][::2] == [
        "all_reduce, out of place, a",
        "all_reduce, out of place, b",
    ]
    (line, _) = results.charts(
        [("a", [*sweep(run="1"), *sweep(run="2", scale=3.0), *sweep(run="3", scale=2.0)])]
    )[1].series
    alone = charts(sweep(scale=2.0))["time"].series[0]
    assert [point.y for point in line.points] == [point.y for point in alone.points]


def test_the_roofline_is_the_link_or_the_shortest_time():
    found = sweep(ranks=16)
    (_, inside) = starting(charts(found, link=20.0), "roofline")
    measured, bound = inside.series
    times = [record.time_us for record in found if record.in_place]
    first = 1.875 * SIZES[0] / min(times) / 1e3
    assert bound.dashed and bound.points[0].y == pytest.approx(first)
    assert bound.points[-1].y == 20.0
    # The bend is where the link becomes the bound.
    bend = 20.0 * 1e3 * min(times) / 1.875
    assert any(point.x == pytest.approx(bend) and point.y == 20.0 for point in bound.points)
    assert "of the link" in inside.note and "more than the link" in inside.note
    for point, top in zip(measured.points, bound.points, strict=False):
        if point.x == top.x:
            assert point.y <= top.y * 1.0001 or top.y == 20.0


def test_the_link_speed_of_the_records_makes_a_roofline():
    found = [
        measurement(bytes=size, busbw_gbps=busbw, link_percent=2 * busbw, time_us=9.0 + size)
        for size, busbw in ((8, 0.1), (1024, 10.0))
    ]
    (chart,) = starting(charts(found), "roofline")
    assert "link speed 50 GB/s" in chart.note


def test_a_slow_rank_stands_out_in_the_matrix_of_ranks():
    (chart, _) = starting(charts(sweep()), "ranks")
    assert len(chart.rows) == 16 and len(chart.columns) == len(SIZES)
    for row, cells in enumerate(chart.cells):
        assert all((cell > 1.05) == (row == 5) for cell in cells)
    low, high = chart.limits()
    assert svg.heat(chart.cells[5][0], low, high, True) == "#d55e00"
    assert (low + high) / 2 == pytest.approx(1.0)


def test_thousands_of_ranks_are_drawn_in_blocks_with_their_slowest():
    times = [10.0] * 4096
    times[3000] = 50.0
    found = [measurement(rank_times_us=tuple(times), world_size=4096)]
    (chart,) = starting(charts(found), "ranks")
    assert len(chart.rows) == 64
    (row,) = [row for row, cells in enumerate(chart.cells) if cells[0] > 1]
    assert chart.rows[row] == "2944-3007"
    assert chart.texts[row][0].startswith("rank 3000, ")


def test_pairs_make_a_matrix_of_latency_and_one_of_bandwidth():
    made = charts(pairs(skip={(2, 9)}))
    (latency,), (bandwidth,) = starting(made, "pairs-latency"), starting(made, "pairs-bandwidth")
    assert "8 B, us" in latency.title and "1 MiB, GB/s" in bandwidth.title
    for chart in (latency, bandwidth):
        assert len(chart.rows) == len(chart.columns) == 16
        for i in range(16):
            assert chart.cells[i][i] is None
            for j in range(16):
                assert chart.cells[i][j] == chart.cells[j][i]
        assert chart.cells[2][9] is None and chart.texts[2][9] == "2 to 9: not measured"
    # Across the two hosts it is slower: the colour says the same in both.
    for chart in (latency, bandwidth):
        low, high = chart.limits()
        near, far = (chart.cells[0][j] for j in (1, 15))
        shades = [svg.heat(v, low, high, chart.high_is_bad) for v in (near, far)]
        assert int(shades[0][5:], 16) > int(shades[0][1:3], 16)  # blue
        assert int(shades[1][5:], 16) < int(shades[1][1:3], 16)  # orange


def test_one_pair_over_sizes_is_a_line(repository):
    from commkit.bench import formats

    found = formats.read(repository / "tests/recorded/bench/imb-2018.txt").records
    made = charts([record for record in found if record.collective == "ping_pong"])
    # No bytes have no place on a logarithmic axis.
    assert next(point.x for point in made["time"].series[0].points) == 8
    assert not starting(made, "pairs")


def test_more_lines_than_can_be_told_apart_are_counted():
    found = [
        measurement(group=f"g{number}", bytes=size) for number in range(40) for size in (8, 64)
    ]
    chart = charts(found)["time"]
    assert len(chart.series) == 16 and "24 more lines" in chart.note


@pytest.mark.parametrize(
    ("low", "high", "base", "expected"),
    [
        (8, 1024, 2, [8, 16, 32, 64, 128, 256, 512, 1024]),
        (1.2, 4.5, 10, [2, 1]),
        (900, 1100, 10, [1000]),
    ],
)
def test_ticks_are_round_numbers_inside(low, high, base, expected):
    ticks = axes.Scale(low, high, 0, 1).ticks(base)
    assert all(low <= tick <= high for tick in ticks) and ticks
    if base == 2:
        assert ticks == expected


def test_a_scale_maps_its_ends_and_one_value_is_in_the_middle():
    scale = axes.around([8.0, 8192.0], 100, 200)
    assert 100 < scale.place(8.0) < scale.place(256.0) < scale.place(8192.0) < 200
    assert axes.around([5.0], 0, 10).place(5.0) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("size", "text"), [(8, "8 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1 << 33, "8 GiB")]
)
def test_sizes_are_named_in_powers_of_1024(size, text):
    assert axes.size_name(size) == text


def test_every_chart_is_well_formed_svg_inside_its_frame():
    for chart in charts(sweep(), pairs(), link=40.0).values():
        root = ElementTree.fromstring(svg.draw(chart))
        _, _, width, height = map(float, root.get("viewBox").split())
        shapes = [*root.iter(f"{SVG}circle"), *root.iter(f"{SVG}rect")]
        assert shapes and all(shape.find(f"{SVG}title").text for shape in shapes)
        for shape in shapes:
            x = float(shape.get("cx") or shape.get("x"))
            y = float(shape.get("cy") or shape.get("y"))
            assert 0 <= x <= width and 0 <= y <= height
        expected = (
            sum(len(series.points) for series in chart.series)
            if isinstance(chart, Lines)
            else len(chart.rows) * len(chart.columns)
        )
        assert len(shapes) == expected
        assert isinstance(chart, Lines | Matrix)


def test_the_page_names_no_other_place_and_escapes_what_it_is_given():
    evil = "<b onclick=x>&\"'"
    found = sweep(collective=evil, environment={"NCCL_ALGO": evil})
    text = page.page([(evil, found)], results.charts([(evil, found)]), evil)
    assert evil not in text and "<b " not in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "default-src 'none'" in text


def test_wrong_data_and_loopback_are_said_above_the_charts():
    found = [measurement(wrong=3), measurement(bytes=8)]
    text = page.page([("a", found)], results.charts([("a", found)]), "t")
    assert "WRONG DATA in 1 rows" in text and "no network was measured" in text


def written(tmp_path, found, name="a.jsonl"):
    path = tmp_path / name
    path.write_text("".join(records.to_line(record) + "\n" for record in found))
    return str(path)


def test_a_page_and_a_picture_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = written(tmp_path, [*sweep(), *pairs()])
    outputs = [str(tmp_path / name) for name in ("b.html", "b.png")]
    done = CliRunner().invoke(
        command,
        ["plot", path, "-o", outputs[0], "-o", outputs[1], "--link-speed", "40"],
        standalone_mode=False,
    )
    assert done.exception is None
    assert done.stdout == "".join(f"{name}: 10 charts\n" for name in outputs)
    assert (tmp_path / "b.html").read_text().count('class="plot"') == 10
    data = (tmp_path / "b.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    import matplotlib.image

    pixels = matplotlib.image.imread(outputs[1])
    # Blue and orange of the matrices and lines are there.
    for colour in (svg.COLOURS[0], svg.COLOURS[1]):
        wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(pixels[:, :, :3] - wanted).max(axis=2) < 0.01).sum() > 1000


def test_without_matplotlib_a_picture_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    sources = [("a", sweep())]
    with pytest.raises(UsageError, match="pip install matplotlib, or commkit.draw."):
        write.write(sources, [str(tmp_path / "a.png")])
    assert write.write(sources, [str(tmp_path / "a.html")])


@pytest.mark.parametrize(
    ("outputs", "link", "expected"),
    [
        (["a.pdf"], None, "-o a.pdf: expected a name that ends in .html or .png"),
        (["a.html"], 0.0, "--link-speed 0: expected GB/s"),
        (["/no/where/a.html"], None, "/no/where/a.html: No such file"),
    ],
)
def test_wrong_outputs_are_named(outputs, link, expected):
    with pytest.raises(UsageError, match=expected):
        write.write([("a", sweep())], outputs, link)


def test_nothing_to_draw_is_an_error():
    with pytest.raises(UsageError, match="a: nothing to draw"):
        write.write([("a", [measurement(bytes=0)][:0])], ["a.html"])
