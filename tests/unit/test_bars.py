"""benchmarks/_bars.py: flags, records and verdicts that all benchmarks share."""

from __future__ import annotations

import importlib.util
import json
import math
import sys

import pytest


@pytest.fixture
def bars(repository, monkeypatch):
    path = repository / "benchmarks" / "_bars.py"
    spec = importlib.util.spec_from_file_location("_bars", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "_bars", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.Bars("example", "An example.")


@pytest.mark.parametrize(
    ("value", "op", "bound", "line"),
    [
        (12288, "<=", 12288, "BAR it 12288 <= 12288 ok"),
        (3, "<", 3, "BAR it 3 < 3 short"),
        (2.5, ">=", 2, "BAR it 2.5 >= 2 ok"),
        (2, ">", 2.25, "BAR it 2 > 2.25 short"),
        (0, "==", 0, "BAR it 0 == 0 ok"),
        (1.23456, "<=", 1.5, "BAR it 1.235 <= 1.5 ok"),
        (math.nan, "<=", 1, "BAR it nan <= 1 short"),
        (math.nan, ">=", 1, "BAR it nan >= 1 short"),
        (math.inf, ">=", 1, "BAR it inf >= 1 ok"),
    ],
)
def test_a_bar_is_one_line_with_its_verdict(bars, capsys, value, op, bound, line):
    bars.parse(["--bars"])
    holds = bars.check("it", value, op, bound)
    status = bars.finish()
    assert capsys.readouterr().out == line + "\n"
    assert (holds, status) == ((True, 0) if line.endswith(" ok") else (False, 1))


def test_one_short_bar_among_others_is_status_1(bars, capsys):
    bars.parse(["--bars"])
    bars.check("a", 1, "<=", 1)
    bars.check("b", 2, "<=", 1)
    bars.check("c", 1, "<=", 1)
    assert bars.finish() == 1
    verdicts = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert verdicts == ["ok", "short", "ok"]


def test_without_the_flag_nothing_is_printed_and_nothing_fails(bars, capsys):
    bars.parse([])
    bars.check("a", 2, "<=", 1)
    assert bars.finish() == 0
    assert capsys.readouterr().out == ""


def test_bars_without_a_judged_bar_are_no_success(bars):
    bars.parse(["--bars"])
    with pytest.raises(RuntimeError, match="no bar was judged"):
        bars.finish()


@pytest.mark.parametrize(
    ("name", "op", "expected"),
    [("a b", "<=", "without spaces"), ("a", "=<", "operator '=<'"), ("old", "<=", "twice")],
)
def test_a_mistake_in_a_benchmark_is_an_error(bars, name, op, expected):
    bars.parse(["--bars"])
    bars.check("old", 1, "<=", 1)
    with pytest.raises(ValueError, match=expected):
        bars.check(name, 1, op, 1)


def test_records_are_appended_with_machine_and_versions(bars, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"benchmark":"older"}\n')
    bars.parse(["--json", str(path), "--quick"])
    bars.keep(ranks=4, seconds=0.5)
    older, mine = (json.loads(text) for text in path.read_text().splitlines())
    assert older == {"benchmark": "older"}
    assert (mine["benchmark"], mine["ranks"], mine["seconds"]) == ("example", 4, 0.5)
    assert mine["machine"]["cores"] >= 1
    assert mine["versions"]["python"]
    bars.finish()


def test_a_file_that_cannot_be_written_is_refused_at_once(bars, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        bars.parse(["--json", str(tmp_path / "no" / "file")])
    assert stopped.value.code == 2
    assert "No such file" in capsys.readouterr().err
