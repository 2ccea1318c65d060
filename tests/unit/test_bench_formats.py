"""Output of other benchmarks as records: recorded files, mixed output, what cannot be told."""

from __future__ import annotations

import json
import random
import re

import pytest

from commkit import records
from commkit.bench import compare, formats
from commkit.bench.formats.bandwidth import factor
from commkit.bench.plots import page, results
from commkit.errors import UsageError
from commkit.measure.collectives import COLLECTIVES
from tests.unit.test_records import measurement


@pytest.fixture
def recorded(repository):
    return repository / "tests" / "recorded" / "bench"


@pytest.fixture
def case(repository):
    cases = json.loads((repository / "tests" / "cases" / "bench-formats.json").read_text())
    return {case["id"]: case for case in cases}.__getitem__


def written(tmp_path, text):
    path = tmp_path / "out.txt"
    path.write_text(text)
    return path


def printed(path):
    """(time, algbw, busbw) of every half row as printed, found here without the reader."""
    found = []
    for line in path.read_text().splitlines():
        words = re.sub(r"^.*?<stdout>:|^\d+: ", "", line).split()
        if len(words) > 8 and words[0].isdigit() and words[1].isdigit():
            numbers = words[words.index("-1") + 1 :] if "-1" in words else words[4:]
            half = 8 if len(numbers) > 15 else 4
            found += [numbers[0:3], numbers[half : half + 3]]
    return found


ALL = {
    "nccl-2.19-a100.txt": ({}, "all_reduce", 8),
    "nccl-2.9-error-column.txt": ({"collective": "all_reduce"}, "all_reduce", 4),
    "nccl-all_gather-tagged.txt": ({}, "all_gather", 16),
    "nccl-tail-of-72-ranks.txt": ({"collective": "all_reduce"}, "all_reduce", 72),
    "nccl-srun-label.txt": ({"collective": "all_reduce", "ranks": 16}, "all_reduce", 16),
    "rccl-not-verified.txt": ({"collective": "all_reduce"}, "all_reduce", 16),
    "nccl-2.19-per-iteration.txt": ({}, "reduce_scatter", 4),
}


@pytest.mark.parametrize("name", ALL)
def test_bandwidths_from_the_printed_times_are_the_printed_bandwidths(recorded, name):
    told, collective, ranks = ALL[name]
    reading = formats.read(recorded / name, **told)
    rows = printed(recorded / name)
    assert len(reading.records) == len(rows) >= 6
    for record, (time, algbw, busbw) in zip(reading.records, rows, strict=True):
        assert (record.collective, record.world_size) == (collective, ranks)
        assert record.time_us == float(time)
        # Both are rounded as printed, and the bandwidth was computed from the exact time.
        rounded = 0.5 * 10 ** -len(time.partition(".")[2]) / float(time)
        for mine, theirs in ((record.algbw_gbps, algbw), (record.busbw_gbps, busbw)):
            assert abs(mine - float(theirs)) <= 0.005001 + mine * rounded * 1.01


def test_json_bandwidths_are_those_of_nccl_tests_to_the_last_digit(recorded):
    reading = formats.read(recorded / "nccl-2.19-v3.json")
    values = json.loads((recorded / "nccl-2.19-v3.json").read_text())["results"]
    halves = [result[part] for result in values for part in ("out_of_place", "in_place")]
    for record, half in zip(reading.records, halves, strict=True):
        assert record.algbw_gbps == pytest.approx(half["alg_bw"], abs=1e-6)
        assert record.busbw_gbps == pytest.approx(half["bus_bw"], abs=1e-6)


def test_text_and_json_of_one_run_give_the_same(recorded):
    text = formats.read(recorded / "nccl-2.19-per-iteration.txt")
    whole = formats.read(recorded / "nccl-2.19-v3.json")
    assert text.averages == pytest.approx(whole.averages, rel=1e-5)
    assert text.out_of_bounds == whole.out_of_bounds == [0]
    for short, full in zip(text.records, whole.records, strict=True):
        for name in ("collective", "dtype", "redop", "root", "in_place", "bytes", "count"):
            assert getattr(short, name) == getattr(full, name)
        for name in ("world_size", "hosts", "wrong", "iterations", "warmup_iterations", "tool"):
            assert getattr(short, name) == getattr(full, name)
        for name in ("time_us", "min_us", "max_us", "p99_us"):
            assert getattr(short, name) == pytest.approx(getattr(full, name), abs=0.006)
        assert short.cv == pytest.approx(full.cv, abs=6e-5)
        assert short.p95_us is None and short.times_us == () and short.slowest_rank == -1
        # -K 1 leaves the first iteration out; rank 2 is 3 us slower than the others.
        assert len(full.times_us) == 7
        assert full.p95_us <= full.p99_us <= full.max_us == max(full.times_us)
        assert full.slowest_rank == 2 and len(full.rank_times_us) == 4
        assert full.slowest_rank_time_us == max(full.rank_times_us)
        assert full.time_is == short.time_is == "mean"


def test_secrets_of_the_environment_in_nccl_tests_json_are_not_read(recorded):
    text = (recorded / "nccl-2.19-v3.json").read_text()
    assert "planted-secret-1" in text and "planted-secret-2" in text
    reading = formats.read(recorded / "nccl-2.19-v3.json")
    assert {tuple(sorted(r.environment)) for r in reading.records} == {("NCCL_ALGO", "NCCL_IB_HCA")}
    assert "planted-secret" not in "".join(map(records.to_line, reading.records))


def test_every_recorded_file_survives_as_records(recorded, tmp_path):
    told = {"collective": "all_reduce", "ranks": 8}
    for path in sorted(recorded.glob("*.*")):
        if path.suffix == ".md" or path.name == "nccl-two-worlds-of-one.txt":
            continue
        found = formats.read(path, **told).records
        assert found
        copy = tmp_path / f"{path.name}.jsonl"
        copy.write_text("".join(records.to_line(record) + "\n" for record in found))
        assert formats.read(copy).records == found
        assert formats.read(copy).format == "commkit records"


def test_the_formulas_are_those_of_nccl_tests(case):
    for value in (case("BENCH-01"), case("BENCH-02")):
        given, wanted = value["input"]["data"], value["expected"]["value"]
        n = given.get("n") or given["nodes"] * given["gpus_per_node"]
        size = given.get("S_bytes") or given["S"]
        algbw = size / given["t_s"] / 1e9
        assert algbw == pytest.approx(wanted["algbw"], abs=0.001)
        busbw = wanted["busbw"]
        for name, number in busbw.items() if isinstance(busbw, dict) else ((given["op"], busbw),):
            name = "all_to_all" if name == "alltoall" else name
            assert algbw * factor(name, n) == pytest.approx(number, abs=0.01)


def test_tagged_lines_logs_in_between_and_missing_values(case, tmp_path):
    given, wanted = case("BENCH-10")["input"]["data"], case("BENCH-10")["expected"]["value"]
    reading = formats.read(written(tmp_path, given), collective="alltoall")
    assert reading.out_of_bounds == [wanted["out_of_bounds"]]
    assert reading.averages == [wanted["avg_busbw"]]
    rows = list(zip(reading.records[::2], reading.records[1::2], strict=True))
    for (outer, inner), row in zip(rows, wanted["rows"], strict=True):
        assert outer.bytes == inner.bytes == row["size"]
        assert (outer.time_us, outer.wrong) == (row["oop"]["us"], row["oop"]["wrong"])
        assert (inner.time_us, inner.wrong) == (row["ip"]["us"], row["ip"]["wrong"])
        assert (outer.in_place, inner.in_place) == (False, True)
        assert (outer.collective, outer.iterations) == ("all_to_all", 20)
    # 14.99 / 17.13 is 7/8 and nothing else.
    assert rows[1][0].world_size == 8
    assert rows[1][0].busbw_gbps == pytest.approx(14.99, abs=0.01)
    assert any("8 ranks, from busbw over algbw" in note for note in reading.notes)
    assert rows[0][0].algbw_gbps == 0


def test_the_columns_of_a_row_are_found_by_the_header(tmp_path):
    header = "# count type root size redop time algbw busbw error time algbw busbw error"
    old = "#  size  count  type  root  time  algbw  busbw  error  time  algbw  busbw  error"
    row = "1048576 262144 float 2 100.0 10.49 10.49 0e+00 101.0 10.38 10.38 N/A"
    reading = formats.read(written(tmp_path, f"{old}\n{row}\n"), collective="broadcast", ranks=2)
    (outer, inner) = reading.records
    assert (outer.root, outer.redop, outer.wrong, outer.time_us) == (2, "none", None, 100.0)
    assert inner.time_us == 101.0
    with pytest.raises(UsageError, match="not recognised"):
        formats.read(written(tmp_path, f"{header}\n{row}\n"), collective="broadcast")


HEADER = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n"
ROW = "1024 256 float sum -1 10.00 0.10 0.15 0 11.00 0.09 0.14 0\n"


def test_a_row_that_another_line_was_written_into_is_left_out_and_said(tmp_path):
    broken = "2048 512 float sum -1host-a:77:90 [3] NCCL INFO Channel 00/0\n"
    cut = "4096 1024 float sum -1 10.0 0.4"
    reading = formats.read(
        written(tmp_path, HEADER + ROW + broken + cut), collective="all_reduce", ranks=4
    )
    assert [record.bytes for record in reading.records] == [1024, 1024]
    assert [note.split(":")[0] for note in reading.notes] == ["line 3", "line 4"]
    assert "expected 13 columns, got" in reading.notes[0]


def test_errors_that_the_tool_reported_are_told(tmp_path):
    text = HEADER + ROW + "host-a: Test NCCL failure common.cu:958 'internal error'\n"
    text += "# error: unhandled system error\n"
    notes = formats.read(written(tmp_path, text), collective="all_reduce", ranks=4).notes
    assert len(notes) == 2 and all("the tool reported" in note for note in notes)


def test_worlds_of_one_that_wrote_into_one_file_are_refused(recorded):
    with pytest.raises(UsageError, match=r"one.txt:8: rank 0 appears twice .*worlds of one rank"):
        formats.read(recorded / "nccl-two-worlds-of-one.txt", collective="all_reduce")


def test_several_runs_in_one_file_stay_apart(recorded, tmp_path):
    text = (recorded / "nccl-2.19-a100.txt").read_text()
    both = text + (recorded / "nccl-2.19-per-iteration.txt").read_text() + text
    reading = formats.read(written(tmp_path, both))
    runs = [record.run for record in reading.records]
    assert [runs.count(run) for run in dict.fromkeys(runs)] == [20, 6, 20]
    assert [record.collective for record in reading.records][18:28:2] == [
        "all_reduce",
        *3 * ["reduce_scatter"],
        "all_reduce",
    ]
    assert len(reading.averages) == 3


def test_groups_of_a_split_world_have_their_own_number_of_ranks(tmp_path):
    text = (
        "# Collective test starting: all_reduce_perf\n# nThread 1 nGpus 1 minBytes 8 maxBytes 8\n"
    )
    for rank in range(8):
        text += f"#  Rank {rank:2d} Group {rank % 2:2d} Pid 1{rank} on host-a device 0 [0x1] GPU\n"
    record = formats.read(written(tmp_path, text + HEADER + ROW)).records[0]
    assert (record.world_size, record.groups) == (4, 2)


def test_a_version_that_names_no_collective_asks_for_it(recorded):
    with pytest.raises(UsageError, match=r"column.txt:13: .*expected --collective"):
        formats.read(recorded / "nccl-2.9-error-column.txt")


def test_wrong_elements_are_counted_even_where_they_are_many(tmp_path):
    row = ROW.replace(" 0 11.00", " 1e+06 11.00")
    reading = formats.read(written(tmp_path, HEADER + row), collective="all_reduce", ranks=4)
    assert [record.wrong for record in reading.records] == [1_000_000, 0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text[: len(text) // 2], "not JSON at column .* text output"),
        (lambda text: text.replace('"version":3', '"version":"x"'), "'version' is 'x'"),
        (lambda text: text.replace('"config"', '"konfig"'), "'config' is missing"),
        (lambda text: text.replace('"time"', '"tim"'), "'time' is missing"),
    ],
)
def test_json_that_nccl_tests_did_not_write_is_refused(recorded, tmp_path, change, expected):
    text = (recorded / "nccl-2.19-v3.json").read_text()
    with pytest.raises(UsageError, match=f"out.txt.*{expected}"):
        formats.read(written(tmp_path, change(text)))


def test_a_newer_version_of_the_json_is_read_and_said(recorded, tmp_path):
    text = (recorded / "nccl-2.19-v3.json").read_text().replace('"version":3', '"version":4')
    reading = formats.read(written(tmp_path, text))
    assert len(reading.records) == 6 and "version 4 is newer" in reading.notes[0]


def test_osu_sizes_times_and_rates(recorded):
    reading = formats.read(recorded / "osu-5.8-several.txt", ranks=2)
    found = {(r.collective, r.bytes): r for r in reading.records}
    assert [note for note in reading.notes if "MPI_Put" in note]
    assert found["all_reduce", 1048576].time_us == 230.90
    assert found["all_reduce", 1048576].busbw_gbps == pytest.approx(1048576 / 230.90 / 1e3)
    assert found["ping_pong", 4194304].time_us == 584.22
    assert (found["ping_pong", 0].source, found["ping_pong", 0].peer) == (0, 1)
    # OSU's MB/s are 1e6 bytes a second.
    assert found["stream", 1048576].algbw_gbps == pytest.approx(18.47689)
    assert found["stream_both", 1048576].algbw_gbps == pytest.approx(31.96381)
    assert len(found) == len(reading.records) == 13


def test_osu_full_output_gives_the_slowest_rank(recorded):
    reading = formats.read(recorded / "osu-6.2-full.txt", ranks=200)
    first = reading.records[0]
    assert (first.time_us, first.mean_us, first.time_is) == (831.04, 132.14, "slowest-mean")
    assert (first.iterations, first.redop, first.min_us) == (100, "sum", None)
    assert first.slowest_rank_time_us == 831.04 and first.slowest_rank == -1


def test_osu_size_of_divided_data_is_one_ranks_part(recorded):
    with pytest.raises(UsageError, match=r"alltoall.txt:1: .*expected --ranks N"):
        formats.read(recorded / "osu-7.5-alltoall.txt")
    found = formats.read(recorded / "osu-7.5-alltoall.txt", ranks=8).records
    assert [record.bytes for record in found] == [8, 16, 32, 64, 128, 256, 512]
    assert {record.wrong for record in found} == {0}
    assert found[0].busbw_gbps == pytest.approx(8 / 12.46 / 1e3 * 7 / 8)


def test_imb_sections_have_their_own_number_of_ranks(recorded):
    reading = formats.read(recorded / "imb-2018.txt")
    found = {(r.collective, r.bytes): r for r in reading.records}
    assert {r.collective: r.world_size for r in reading.records} == {
        "ping_pong": 2,
        "all_reduce": 144,
        "sendrecv": 16,
    }
    # IMB's Mbytes/sec of this version are 1e6 bytes a second.
    assert found["ping_pong", 268435456].algbw_gbps == pytest.approx(12.23650, abs=1e-5)
    slow = found["all_reduce", 4096]
    assert (slow.time_us, slow.mean_us, slow.time_is) == (27.01, 19.67, "slowest-mean")
    assert slow.busbw_gbps == pytest.approx(4096 / 27.01 / 1e3 * 2 * 143 / 144)
    assert not reading.notes


def test_what_is_no_result_is_refused_with_what_was_expected(tmp_path):
    with pytest.raises(UsageError, match="out.txt: not recognised; expected records of commkit"):
        formats.read(written(tmp_path, "hello\n"))
    with pytest.raises(UsageError, match="out.txt: empty"):
        formats.read(written(tmp_path, "\n"))
    with pytest.raises(UsageError, match="nothing: No such file"):
        formats.read(tmp_path / "nothing")


def test_records_of_commkit_are_read_beside_the_others(tmp_path):
    path = written(tmp_path, records.to_line(measurement()) + "\n")
    assert formats.read(path).records == [measurement()]


def test_the_factors_are_those_that_runs_use():
    for row in COLLECTIVES.values():
        for n in (2, 3, 8, 1024):
            assert (factor(row.name, n) or 0.0) == pytest.approx(row.busbw_factor(n)), row.name
        assert factor(row.name, 1) is None and row.busbw_factor(1) == 0


INSERTED = ["\n", "\x00", "NCCL INFO x\n", " 7 ", "-", "N/A", "# Rank  0 Pid 1 on a device 0"]
INSERTED += ["9" * 400, "1e400", "e", '"', "[", ",", "²", "time", "#processes = 0", "inf", "nan"]


def test_files_that_are_cut_or_damaged_give_rows_or_one_error(recorded, tmp_path):
    """A killed run ends anywhere; other output is written into any line."""
    generator = random.Random(1)
    path = tmp_path / "damaged.txt"
    for source in sorted(recorded.glob("*.[tj]*")):
        for _ in range(40):
            text = source.read_text()
            text = text[: generator.randrange(len(text))] if generator.random() < 0.5 else text
            for _ in range(generator.randrange(5)):
                place = generator.randrange(len(text) + 1)
                after = text[place + generator.randrange(9) :]
                text = text[:place] + generator.choice(INSERTED) + after
            path.write_text(text)
            try:
                found = formats.read(path, collective="all_reduce", ranks=8).records
                for record in found:
                    assert records.from_line(records.to_line(record)) == record
                made = results.charts([("damaged", found)], 3.0)
                page.page([("damaged", found)], made, "damaged")
                compare.compare(found, found)
            except UsageError as error:
                assert "\n" not in str(error)
