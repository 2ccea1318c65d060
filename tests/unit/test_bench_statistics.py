"""Times to figures: the definitions of nccl-tests' performance document, and no nan anywhere."""

from __future__ import annotations

import pytest

from commkit.measure import statistics
from commkit.measure.collectives import ALL_REDUCE


def test_bandwidths_of_eight_ranks_and_a_gibibyte_in_five_milliseconds():
    algbw = statistics.algbw(1 << 30, 0.005)
    assert algbw == pytest.approx(214.748, abs=5e-4)
    assert algbw * ALL_REDUCE.busbw_factor(8) == pytest.approx(375.81, abs=5e-3)


@pytest.mark.parametrize(("size", "element", "count"), [(1000, 4, 250), (1003, 4, 250), (7, 8, 0)])
def test_sizes_are_rounded_down_to_whole_elements(size, element, count):
    assert ALL_REDUCE.shape(size, element, 3).part == count


def test_one_rank_has_no_bus():
    assert ALL_REDUCE.busbw_factor(1) == 0


@pytest.mark.parametrize(("size", "seconds"), [(0, 1.0), (8, 0.0), (0, 0.0)])
def test_no_bytes_or_no_time_is_no_bandwidth(size, seconds):
    assert statistics.algbw(size, seconds) == 0


def test_a_summary_of_a_hundred_times():
    found = statistics.summarize([float(value) for value in range(100, 0, -1)])
    assert (found.minimum, found.maximum, found.mean) == (1, 100, 50.5)
    assert (found.p50, found.p95, found.p99) == (50.5, 95, 99)
    assert found.cv == pytest.approx(28.866 / 50.5, abs=1e-4)


def test_an_outlier_does_not_move_the_median():
    assert statistics.summarize([1.0] * 19 + [100.0]).p50 == 1.0


def test_one_time_is_its_own_summary():
    found = statistics.summarize([3.0])
    assert (found.p50, found.p95, found.p99, found.maximum, found.cv) == (3, 3, 3, 3, 0)


def test_zero_times_have_no_spread():
    assert statistics.summarize([0.0, 0.0]).cv == 0


def test_no_times_are_an_error():
    with pytest.raises(ValueError, match="no times"):
        statistics.summarize([])


def test_the_slowest_rank_of_each_iteration_counts():
    rows = [[1.0, 5.0, 1.0], [2.0, 2.0, 2.0], [3.0, 1.0, 1.0]]
    assert statistics.slowest_over_ranks(rows) == (3.0, 5.0, 2.0)
    assert statistics.slowest_rank(rows) == (1, 2.0)


def test_ranks_with_different_numbers_of_iterations_are_an_error():
    with pytest.raises(ValueError, match="zip"):
        statistics.slowest_over_ranks([[1.0, 2.0], [1.0]])
