"""Records as tables, CSV and JSON lines, by functions and by `commkit bench show`."""

from __future__ import annotations

import csv as readers
import io
import json

import pytest
from click.testing import CliRunner

from commkit import records
from commkit.bench import formats
from commkit.bench.formats import csv, table
from commkit.cli.bench import command
from commkit.records import WrongElement
from tests.unit.test_records import measurement

FILE = "tests/recorded/bench/nccl-2.19-a100.txt"


def pair(**changes):
    return [measurement(in_place=False, **changes), measurement(in_place=True, **changes)]


def test_a_table_of_nccl_tests_is_printed_again_as_it_was(repository):
    path = repository / FILE
    again = list(table.lines(formats.read(path).records))
    original = [line.rstrip() for line in path.read_text().splitlines()]
    rows = [line for line in original if line and not line.startswith("#")]
    header = [line for line in original if "size" in line and "redop" in line]
    assert [line.rstrip() for line in again if "redop" in line] == header
    mine = [line.split() for line in again if not line.startswith("#")]
    for line, row in zip(mine, rows, strict=True):
        words = row.split()
        assert line[:6] + line[8:10] + line[12:] == words[:6] + words[8:10] + words[12:]
        # Bandwidths come from the rounded times.
        for column in (6, 7, 10, 11):
            assert float(line[column]) == pytest.approx(float(words[column]), abs=0.0101)
    assert "# Out of bounds values : 0 OK" in again


def test_the_wide_table_is_nccl_tests_with_I_and_columns_at_the_end(repository, tmp_path):
    source = repository / "tests/recorded/bench/nccl-2.19-per-iteration.txt"
    wide = list(table.lines(formats.read(source).records, wide=True))
    original = [line for line in source.read_text().splitlines() if " redop " in line]
    (header,) = [line for line in wide if " redop " in line]
    assert header.startswith(original[0].replace("timestamp", "").rstrip())
    assert header.split()[-6:] == ["p95", "p95-ip", "slow", "skew%", "xhost", "link%"]
    assert len({len(line) for line in wide if line[0] != "#" or " redop " in line}) == 1
    # The reader of -I finds its columns, ours at the end do not disturb it.
    path = tmp_path / "wide.txt"
    path.write_text("# Collective test starting: reduce_scatter_perf\n" + "\n".join(wide))
    for again, first in zip(
        formats.read(path, ranks=4).records, formats.read(source).records, strict=True
    ):
        for name in ("time_us", "min_us", "max_us", "p99_us", "cv", "wrong", "bytes"):
            assert getattr(again, name) == pytest.approx(getattr(first, name))


def test_a_row_without_its_other_half_keeps_its_columns(tmp_path):
    whole, half = table.row_line(*pair()), table.row_line(measurement(), None)
    assert len(whole.split()) == len(half.split()) == 13
    assert half.split()[9:] == ["N/A"] * 4
    assert table.row_line(None, measurement()).split()[5:9] == ["N/A"] * 4
    path = tmp_path / "half.txt"
    path.write_text("\n".join([*table.label_lines(), half, whole]))
    read = formats.read(path, collective="all_reduce", ranks=4).records
    assert [record.in_place for record in read] == [False, False, True]


def test_runs_and_worlds_do_not_mix_in_a_row():
    found = table.rows([*pair(run="a"), *pair(run="b"), *pair(run="b", world_size=2)])
    assert len(found) == 3
    for outer, inner in found:
        assert (outer.run, outer.world_size) == (inner.run, inner.world_size)
    titles = [line for line in table.lines([*pair(), *pair(world_size=2)]) if "ranks" in line]
    assert len(titles) == 2


def test_bus_bandwidth_that_is_not_defined_is_zero_and_that_is_not_known_is_said():
    alone = measurement(world_size=1, busbw_gbps=None)
    unknown = measurement(world_size=0, busbw_gbps=None)
    assert table.row_line(alone, None).split()[7] == "0.00"
    assert table.row_line(unknown, None).split()[7] == "N/A"


def test_busbw_and_the_rate_between_hosts_stand_side_by_side():
    """All-to-all of 1 GiB on 2 x 8 ranks in 257 ms: users took busbw for a NIC's speed."""
    record = measurement(
        collective="all_to_all",
        bytes=1 << 30,
        world_size=16,
        time_us=257e3,
        algbw_gbps=4.178,
        busbw_gbps=3.917,
        inter_host_gbps=536870912 / 257e3 / 1e3,
    )
    words = table.row_line(None, record, wide=True).split()
    assert words[15] == "3.92" and words[-2] == "2.09"


def test_csv_holds_every_field_and_is_read_back():
    wrong = WrongElement(3, 77, "nan", 4.0)
    found = [measurement(environment={"NCCL_ALGO": 'a,"b'}, wrong=1, first_wrong=wrong)]
    found.append(measurement(busbw_gbps=None, wrong=None))
    text = "\n".join(csv.lines(found))
    rows = list(readers.DictReader(io.StringIO(text)))
    assert json.loads(rows[0]["environment"]) == {"NCCL_ALGO": 'a,"b'}
    assert json.loads(rows[0]["times_us"]) == [10.0, 12.5, 11.25]
    assert (rows[0]["first_wrong_rank"], rows[0]["first_wrong_got"]) == ("3", "nan")
    assert (rows[1]["busbw_gbps"], rows[1]["wrong"], rows[1]["first_wrong_rank"]) == ("", "", "")
    assert rows[0]["in_place"] == "true"
    kept = {name for name in rows[0] if not name.startswith("first_wrong_")}
    assert kept == set(json.loads(records.to_line(found[0]))) - {"first_wrong"}


def run(*arguments):
    # Errors are turned into one line by commkit.cli, which is tested beside it.
    return CliRunner().invoke(command, arguments, standalone_mode=False)


def test_show_prints_tables_records_and_csv(repository, tmp_path):
    path = str(repository / FILE)
    assert "# all_reduce, 8 ranks" in run("show", path).stdout
    assert " i_cv% " in run("show", path, "--as", "wide").stdout
    lines = run("show", path, path, "--as", "json").stdout.splitlines()
    assert len(lines) == 40 and records.from_line(lines[0]).tool == "nccl-tests"
    assert run("show", path, "--as", "csv").stdout.splitlines()[0] == ",".join(csv.COLUMNS)


def test_show_says_on_standard_error_what_a_file_lacks(repository):
    path = str(repository / "tests/recorded/bench/nccl-tail-of-72-ranks.txt")
    done = run("show", path, "--collective", "all_reduce")
    assert "# all_reduce, 72 ranks" in done.stdout
    assert "72 ranks, from busbw over algbw" in done.stderr
    assert "expected the number of ranks" in str(run("show", path, "--ranks", "-1").exception)
