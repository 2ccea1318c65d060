"""Comparisons: known ratios are found, noise is not called a regression, and exit codes follow."""

from __future__ import annotations

import dataclasses
import random
import statistics

import pytest
from click.testing import CliRunner

from commkit import records
from commkit.bench import compare as comparing
from commkit.bench.bootstrap import medians, ratio
from commkit.cli.bench import command
from commkit.errors import UsageError
from tests.unit.test_records import measurement


def noisy(generator, scale, count=20):
    """Times with a long tail, as those of collectives have."""
    return tuple(scale * (1 + 0.02 * generator.gammavariate(2, 1)) for _ in range(count))


def record(times, **changes):
    return measurement(times_us=tuple(times), time_us=statistics.median(times), **changes)


def test_drawn_medians_are_distributed_as_those_of_resampled_lists():
    generator = random.Random(1)
    for count in (1, 2, 5, 20):
        times = noisy(generator, 10.0, count)
        fast = sorted(medians(times, generator, 8000))
        plain = sorted(statistics.median(generator.choices(times, k=count)) for _ in range(8000))
        for share in (0.025, 0.25, 0.5, 0.75, 0.975):
            place = int(share * 8000)
            # Quantiles of two samples of 8000: their ranks differ by less than 5 sigma.
            slack = int(5 * (2 * 8000 * share * (1 - share)) ** 0.5)
            low, high = plain[max(0, place - slack)], plain[min(7999, place + slack)]
            assert low <= fast[place] <= high


@pytest.mark.parametrize(("runs", "least"), [(2, 0.68), (8, 0.86)])
def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says(runs, least):
    generator = random.Random(2)
    worlds, held = 200, 0
    for seed in range(worlds):
        # Runs differ by 2 %, iterations by more; the truth is 1.1.
        before, after = (
            [noisy(generator, scale * generator.lognormvariate(0, 0.02)) for _ in range(runs)]
            for scale in (100.0, 110.0)
        )
        found = ratio(before, after, seed=seed)
        held += found.low <= 1.1 <= found.high
    # 95 % wanted; a bootstrap over few runs gives less, docs/bench-output.md says how much.
    assert least * worlds <= held < worlds


def test_one_run_of_iterations_has_an_interval_and_a_single_time_has_none():
    generator = random.Random(3)
    wide = ratio([noisy(generator, 100.0, 6)], [noisy(generator, 100.0, 6)])
    narrow = ratio([noisy(generator, 100.0, 600)], [noisy(generator, 100.0, 600)])
    assert wide.low < wide.value < wide.high
    assert narrow.high - narrow.low < (wide.high - wide.low) / 3
    alone = ratio([(100.0,)], [(120.0,)])
    assert (alone.value, alone.low, alone.high) == (pytest.approx(1.2), None, None)


def test_comparing_twice_gives_the_same_interval():
    times = [noisy(random.Random(4), 100.0)], [noisy(random.Random(5), 100.0)]
    assert ratio(*times, seed=7) == ratio(*times, seed=7)


def sweep(generator, scale, runs=3, sizes=(8, 1024, 1048576), **changes):
    """Records of a sweep; `scale` maps size -> factor on its times."""
    return [
        record(
            noisy(generator, 10.0 * scale.get(size, 1.0)),
            bytes=size,
            count=size // 4,
            in_place=in_place,
            run=f"r{run}",
            **changes,
        )
        for run in range(runs)
        for size in sizes
        for in_place in (False, True)
    ]


def test_a_planted_regression_is_found_at_its_size_and_nowhere_else():
    generator = random.Random(6)
    found = comparing.compare(sweep(generator, {}), sweep(generator, {1024: 1.2}))
    verdicts = {(row.record.bytes, row.record.in_place): row.verdict for row in found.rows}
    assert verdicts == {
        (size, in_place): "SLOWER" if size == 1024 else "same"
        for size in (8, 1024, 1048576)
        for in_place in (False, True)
    }
    assert [len(row.before) for row in found.rows] == [3] * 6
    assert found.exit_code == 5
    assert found.rows[2].ratio.value == pytest.approx(1.2, rel=0.03)
    for row in found.rows:
        assert row.after_us / row.before_us == pytest.approx(row.ratio.value)
    assert list(found.lines())[-1] == "# 6 rows at 5 %: 2 slower, 0 faster, 4 the same, 0 unsure"


def test_the_other_way_round_it_is_an_improvement():
    generator = random.Random(6)
    found = comparing.compare(sweep(generator, {1024: 1.2}), sweep(generator, {}))
    assert {row.verdict for row in found.rows if row.record.bytes == 1024} == {"faster"}
    assert found.exit_code == 0


def test_noise_alone_is_no_regression():
    generator = random.Random(8)
    for _ in range(30):
        assert not comparing.compare(sweep(generator, {}), sweep(generator, {})).slower


def test_a_ratio_that_may_be_above_or_below_the_threshold_is_unsure():
    before = record([10, 10, 10, 10, 20, 20, 20, 20, 15])
    after = record([11, 11, 11, 11, 22, 22, 22, 22, 16])
    (row,) = comparing.compare([before], [after]).rows
    assert row.verdict == "unsure"
    assert row.ratio.low < 1 < row.ratio.high


def test_the_threshold_is_what_decides():
    generator = random.Random(9)
    before, after = sweep(generator, {}), sweep(generator, {1024: 1.2})
    assert comparing.compare(before, after, 0.3).exit_code == 0
    assert comparing.compare(before, after, 0.1).exit_code == 5


def test_files_without_single_times_are_judged_by_the_ratio_and_it_is_said():
    before = measurement(times_us=(), time_us=100.0, mean_us=None)
    slower = dataclasses.replace(before, time_us=106.0)
    found = comparing.compare([before], [slower])
    assert [row.verdict for row in found.rows] == ["SLOWER"]
    assert any("no interval" in line for line in found.lines())
    assert not comparing.compare([before], [dataclasses.replace(before, time_us=104.0)]).slower


def test_a_median_is_not_held_against_a_mean_where_both_sides_have_a_mean():
    mine = measurement(times_us=(10.0, 10.0, 40.0), time_us=10.0, mean_us=20.0)
    theirs = measurement(times_us=(), time_us=20.0, mean_us=20.0, time_is="mean", tool="nccl-tests")
    (row,) = comparing.compare([theirs], [mine]).rows
    assert row.ratio.value == pytest.approx(1.0)


def test_wrong_data_come_before_speed():
    generator = random.Random(10)
    before, after = sweep(generator, {}), sweep(generator, {1024: 0.5})
    after[0] = dataclasses.replace(after[0], wrong=3)
    found = comparing.compare(before, after)
    assert found.exit_code == 4
    assert any(", 3 wrong" in line for line in found.lines())


def test_wrong_data_count_where_there_is_nothing_to_compare_them_with():
    same = record([10.0] * 20)
    wrong = record([10.0] * 20, bytes=same.bytes * 2, count=same.count * 2, wrong=7)
    found = comparing.compare([same], [same, wrong])
    assert found.exit_code == 4
    assert "1 with wrong data" in list(found.lines())[-1]


def test_what_differs_between_the_sides_is_listed():
    before = measurement(environment={"NCCL_ALGO": "Ring"}, versions={"torch": "2.13.0"})
    after = measurement(environment={"NCCL_PROTO": "LL"}, versions={"torch": "2.14.0"})
    assert comparing.compare([before], [after]).differences == [
        "NCCL_ALGO: Ring -> unset",
        "NCCL_PROTO: unset -> LL",
        "torch: 2.13.0 -> 2.14.0",
    ]


def test_rows_of_one_side_only_are_listed_and_do_not_decide():
    generator = random.Random(11)
    found = comparing.compare(
        sweep(generator, {}, sizes=(8, 1024)), sweep(generator, {}, sizes=(1024, 4096))
    )
    assert len(found.rows) == 2 and found.exit_code == 0
    text = "\n".join(found.lines())
    assert "# only before: all_reduce, 4 ranks: size 8, 8" in text
    assert "# only after: all_reduce, 4 ranks: size 4096, 4096" in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"world_size": 8}, "world_size is 4 in the first and 8 in the second"),
        ({"collective": "broadcast"}, "collective is all_reduce in the first and broadcast"),
        ({"bytes": 7}, "bytes is 1024 in the first and 7 in the second"),
        ({"time_us": 0.0}, "the second has no rows with a time"),
    ],
)
def test_nothing_in_common_is_a_usage_error_that_says_why(changes, expected):
    with pytest.raises(UsageError, match=expected):
        comparing.compare([measurement()], [measurement(**changes)])


def test_back_ends_can_be_compared():
    found = comparing.compare([measurement(backend="gloo")], [measurement(backend="mpi")])
    assert found.differences == ["backend: gloo -> mpi"]


def written(path, found):
    path.write_text("".join(records.to_line(record) + "\n" for record in found))
    return str(path)


def test_the_command_prints_the_table_and_ends_with_5(tmp_path):
    generator = random.Random(12)
    before = written(tmp_path / "a.jsonl", sweep(generator, {}))
    after = written(tmp_path / "b.jsonl", sweep(generator, {8: 1.5}))
    done = CliRunner().invoke(command, ["compare", before, after], standalone_mode=False)
    assert done.return_value == 5
    assert done.stdout.count("SLOWER") == 2
    for threshold in ("x", "0", "100", "-5%"):
        done = CliRunner().invoke(
            command, ["compare", before, after, "--threshold", threshold], standalone_mode=False
        )
        assert f"--threshold {threshold}: expected a percentage" in str(done.exception)


def test_a_run_is_held_against_a_baseline_of_any_format(repository):
    path = repository / "tests" / "recorded" / "bench" / "nccl-2.19-a100.txt"
    from commkit.bench import formats

    mine = [
        dataclasses.replace(item, time_us=2 * item.time_us, tool="commkit", backend="gloo")
        for item in formats.read(path).records
    ]
    assert comparing.against(path, mine).exit_code == 5
    assert comparing.against(path, formats.read(path).records).exit_code == 0
