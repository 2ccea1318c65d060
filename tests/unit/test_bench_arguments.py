"""Flags of nccl-tests: what is accepted, what it means, how it is refused."""

from __future__ import annotations

import itertools
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commkit.bench.arguments import Gate, parse_gate, parse_size, plan
from commkit.errors import UsageError
from commkit.measure.numbers import NUMBERS

FLAGS = {"-b": "minbytes", "-e": "maxbytes", "-f": "stepfactor", "-i": "stepbytes"}


def sizes(command):
    words = shlex.split(command)
    values = {
        FLAGS[flag]: int(value) if flag == "-f" else value
        for flag, value in zip(words[::2], words[1::2], strict=True)
    }
    return list(plan(**values).sizes())


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("-b 8 -e 64 -i 8", [8, 16, 24, 32, 40, 48, 56, 64]),
        ("-b 8 -e 64 -f 2", [8, 16, 32, 64]),
        ("-b 8 -e 65 -f 2", [8, 16, 32, 64]),
        ("-b 8 -e 64 -f 1 -i 16", [8, 24, 40, 56]),  # nccl-tests' way to say: by bytes
        ("-b 0 -e 64 -f 2", [0, 8, 16, 32, 64]),
        ("-b 0 -e 0", [0]),
        ("-b 0 -e 0 -f 2", [0]),
        ("-b 1M -e 1M", [1 << 20]),
        ("", [32 << 20]),
        ("-e 1K", [1 << 10]),
        ("-b 64M", [64 << 20]),
        ("-b 16M -f 2", [16 << 20, 32 << 20]),
        ("-b 1 -e 3 -i 1", [1, 2, 3]),
    ],
)
def test_flags_give_these_sizes(command, expected):
    assert sizes(command) == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("-b 2G -e 1G", "-b 2G is larger than -e 1G"),
        ("-b 8 -e 64 -f 1 -i 0", "-i 0: step must be > 0"),
        ("-b 8 -e 64 -i 0", "-i 0: step must be > 0"),
        ("-b 8 -e 1M -f 0", "-f 0: factor must be >= 2"),
        ("-b 8 -e 1M -f 1", "-f 1: factor must be >= 2"),
        ("-b 8 -e 1M -f -2", "-f -2: factor must be >= 2"),
        ("-b 8 -e 1M -f 2 -i 8", "a factor or a step, not both"),
        ("-b 0 -e 1T -i 1", "expected at most 10000"),
        ("-b 8KiB", "-b 8KiB: expected a size"),
        ("-e 9999999T", "expected at most"),
    ],
)
def test_flags_that_cannot_be_are_refused_in_one_line(command, expected):
    with pytest.raises(UsageError, match=expected) as refused:
        sizes(command)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("8", 8),
        ("8k", 8192),
        ("8K", 8192),
        ("3M", 3 << 20),
        ("1g", 1 << 30),
        ("2T", 2 << 40),
    ],
)
def test_sizes_are_powers_of_1024(text, expected):
    assert parse_size("-b", text) == expected


@pytest.mark.parametrize(
    "text", ["", "K", "8KB", "8 K", "8X", "-8", "1.5G", "0x10", "1e6", "8K8", "\u0668"]
)
def test_text_that_nccl_tests_would_swallow_is_refused(text):
    with pytest.raises(UsageError, match="expected a size"):
        parse_size("-b", text)


@given(
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 20),
    st.integers(2, 100),
    st.integers(1024, 1 << 20),
)
def test_every_accepted_sweep_ends_and_rises(low, high, factor, step):
    low, high = sorted((low, high))
    for more in ({"stepfactor": factor}, {"stepbytes": str(step)}):
        found = plan(minbytes=str(low), maxbytes=str(high), **more).sizes()
        assert found[0] == low
        assert all(a < b <= high for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"iters": 0}, "-n 0: expected at least 1"),
        ({"warmup_iters": -1}, "-w -1: expected at least 0"),
        ({"check": -1}, "-c -1: expected at least 0"),
        ({"nproc": 0}, "--nproc 0: expected 1 to 1024"),
        ({"timeout": 0.0}, "--timeout 0: expected seconds"),
        ({"timeout": float("nan")}, "--timeout nan: expected seconds"),
        ({"datatype": "fp64"}, "-d fp64: expected one of int8, uint8, "),
        ({"op": "mean"}, "-o mean: expected one of sum, prod, "),
        ({"min_busbw": ("fast",)}, "--min-busbw fast: expected GB/s"),
    ],
)
def test_other_values_are_checked_too(values, expected):
    with pytest.raises(UsageError, match=expected):
        plan(**values)


def test_all_means_every_type_and_reduction():
    found = plan(datatype="all", op="all")
    assert [number.name for number in found.numbers] == list(NUMBERS)
    assert found.redops == ("sum", "prod", "max", "min", "avg")


@pytest.mark.parametrize(
    ("text", "expected"), [("300", Gate(0, 300.0)), ("1G:0.5", Gate(1 << 30, 0.5))]
)
def test_a_gate_may_begin_at_a_size(text, expected):
    assert parse_gate(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "1G:", "x:3", "1G:2:3"])
def test_a_gate_that_cannot_fail_or_be_read_is_refused(text):
    with pytest.raises(UsageError, match="--min-busbw"):
        parse_gate(text)
