"""The table is the one that readers of nccl-tests know."""

from __future__ import annotations

import pytest

from commkit.bench import table
from commkit.bench.arguments import plan
from commkit.measure.collectives import ALL_REDUCE
from commkit.measure.engine import Placement, Result
from commkit.measure.statistics import algbw, summarize
from commkit.records import WrongElement


def placement(in_place, size, seconds, *, wrong=0, first=None, factor=1.75):
    bandwidth = algbw(size, seconds)
    return Placement(
        in_place=in_place,
        times=(seconds,),
        summary=summarize([seconds]),
        slowest_rank=0,
        slowest_time=seconds,
        algbw=bandwidth,
        busbw=bandwidth * factor if factor else None,
        wrong=wrong,
        first_wrong=first,
    )


def result(size, outer, inner, **changes):
    return Result(
        count=size // 4,
        bytes=size,
        out_of_place=placement(False, size, outer, **changes),
        in_place=placement(True, size, inner, **changes),
        stop=False,
    )


def test_the_column_labels_are_those_of_nccl_tests():
    assert table.label_lines() == [
        "#",
        "#                                                              "
        "out-of-place                       in-place          ",
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong"
        "     time   algbw   busbw  #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)        "
        "     (us)  (GB/s)  (GB/s)        ",
    ]


def test_a_row_stands_under_its_labels():
    size_label, unit_label = table.label_lines()[2:]
    row = table.result_line(result(1 << 20, 61.2e-6, 1.5), "float", "sum")
    assert len(row) == len(size_label) == len(unit_label)
    assert row == (
        "     1048576        262144     float     sum      -1    61.20   17.13   29.98       0"
        "  1500000    0.00    0.00       0"
    )


def test_what_was_not_verified_is_not_called_right():
    row = table.result_line(result(64, 1e-6, 1e-6, wrong=None), "float", "sum")
    assert row.split()[8] == row.split()[12] == "N/A"


def test_many_wrong_elements_keep_their_column():
    row = table.result_line(result(64, 1e-6, 1e-6, wrong=123_456_789), "float", "sum")
    assert row.split()[8] == "1.23457e+08"


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (0.12, 7, "0.12"),
        (9999.994, 7, "9999.99"),
        (99999.94, 7, "99999.9"),
        (123456.7, 7, "123457"),
        (9999999.0, 7, "9999999"),
        (1.2e8, 7, "1.2e+08"),
        (999.994, 6, "999.99"),
        (1.2e8, 6, "1e+08"),
    ],
)
def test_as_many_digits_as_fit(value, width, text):
    assert table.fitted(value, width) == text


def test_the_average_counts_both_placements_and_no_empty_rows():
    results = [result(0, 1e-6, 1e-6), result(1000, 1e-6, 0.5e-6, factor=1.0)]
    assert table.average_busbw(results) == pytest.approx(1.5)
    assert table.average_busbw([]) == table.average_busbw(results[:1]) == 0


def test_one_rank_has_no_bus_bandwidth_to_average():
    assert table.average_busbw([result(1000, 1e-6, 1e-6, factor=0)]) == 0


def test_the_footer_counts_wrong_elements_of_all_rows():
    fine = table.footer_lines([result(1000, 1e-6, 1e-6)], ALL_REDUCE)
    bad = table.footer_lines([result(1000, 1e-6, 1e-6, wrong=2)] * 3, ALL_REDUCE)
    assert fine[0] == "# Out of bounds values : 0 OK"
    assert bad[0] == "# Out of bounds values : 12 FAILED"
    assert bad[1].startswith("# Avg bus bandwidth    : 1.75")


def test_the_first_wrong_element_is_told_exactly():
    wrong = WrongElement(rank=13, index=77, got=3.0000002384185791, expected=3.0)
    lines = table.first_wrong_lines(result(1000, 1e-6, 1e-6, wrong=1, first=wrong))
    assert lines[0] == (
        "# first bad (out of place): rank 13 index 77 got 3.0000002384185791 expected 3"
    )
    assert table.first_wrong_lines(result(1000, 1e-6, 1e-6)) == []


def test_the_plan_line_is_that_of_nccl_tests():
    factor = table.plan_lines(plan(minbytes="8", maxbytes="1M", stepfactor=2), ALL_REDUCE)
    step = table.plan_lines(plan(minbytes="8", maxbytes="64", stepbytes="8"), ALL_REDUCE)
    assert factor[1] == (
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 1048576 step: 2(factor) warmup iters: 1 iters: 20 "
        "agg iters: 1 validation: 1 graph: 0 unalign: 0"
    )
    assert " step: 8(bytes) " in step[1]


def test_a_header_of_thousands_of_ranks_stays_readable():
    lines = table.device_lines([("gpu-1", 4242, " 0 NVIDIA H100")] * 12288)
    assert lines[1] == "#  Rank  0 Group  0 Pid   4242 on      gpu-1 device  0 NVIDIA H100"
    assert len(lines) == 66
    assert lines[-1] == "#  ... and 12224 more ranks"
