"""Slurm's notations, against what Slurm itself prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commkit.errors import UsageError
from commkit.topology.hostlist import MAX_HOSTS, MAX_RANGE, expand, expand_counts

TESTS = Path(__file__).resolve().parent.parent
RECORDED = json.loads((TESTS / "recorded" / "scontrol.json").read_text())["expanded"]
CASES = {c["id"]: c for c in json.loads((TESTS / "cases" / "env-parse.json").read_text())}


@pytest.mark.parametrize("text", RECORDED)
def test_lists_expand_as_scontrol_prints_them(text):
    assert expand(text) == RECORDED[text]


def _rows():
    one = CASES["ENV-01"]
    yield one["input"]["data"]["SLURM_JOB_NODELIST"], one["expected"]["value"]["nodes"]
    for name in ("ENV-02", "ENV-04"):
        yield CASES[name]["input"]["data"], CASES[name]["expected"]["value"]
    for name in ("ENV-05", "ENV-07"):
        case = CASES[name]
        yield from zip(case["input"]["data"], case["expected"]["value"], strict=True)


@pytest.mark.parametrize(("text", "hosts"), list(_rows()))
def test_reported_lists_expand_completely(text, hosts):
    assert expand(text) == hosts


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("n[1-2", "[1-2"),
        ("n1-2]", "n1-2]"),
        ("n[]", "[]"),
        ("n[5-3]", "5-3"),
        ("n[a-c]", "a-c"),
        ("n[1-5:2]", "1-5:2"),
        ("n[1-70000]", "1-70000"),
        ("n[1, 3]", "n[1, "),
        ("n[1,,3]", "[1,,3]"),
        ("n[[1-2]]", "[["),
        (",", ","),
    ],
)
def test_a_malformed_list_is_quoted_with_its_offending_part(text, part):
    with pytest.raises(UsageError) as caught:
        expand(text)
    assert f"host list {text!r}: {part!r}: expected" in str(caught.value)


def test_every_reported_malformed_list_is_refused():
    for text in CASES["ENV-08"]["input"]["data"]:
        with pytest.raises(UsageError, match="host list"):
            expand(text)


def test_a_range_of_slurms_limit_is_accepted():
    assert len(expand(f"n[1-{MAX_RANGE}]")) == MAX_RANGE


def test_a_product_beyond_any_cluster_is_refused_before_it_is_built():
    with pytest.raises(UsageError, match=f"at most {MAX_HOSTS} hosts"):
        expand("a[1-60000]b[1-60000]c[1-60000]")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z]{1,5}", fullmatch=True),
            st.integers(1, 4),
            st.integers(0, 500),
            st.integers(0, 30),
            st.sampled_from(["", "-ib0", ".example.org"]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_well_formed_list_expands_to_its_parts_in_order(parts):
    text = ",".join(f"{n}[{lo:0{w}d}-{lo + more}]{tail}" for n, w, lo, more, tail in parts)
    expected = [
        f"{n}{i:0{w}d}{tail}" for n, w, lo, more, tail in parts for i in range(lo, lo + more + 1)
    ]
    assert expand(text) == expected


@settings(max_examples=300, deadline=None)
@given(st.text("n1-[], x23:a", max_size=12))
def test_any_text_gives_hosts_or_a_usage_error(text):
    try:
        hosts = expand(text)
    except UsageError:
        return
    assert hosts
    assert not any(set(host) & set("[], ") for host in hosts)


def test_task_counts_are_run_length_encoded():
    case = CASES["ENV-10"]
    rows = [next(iter(row.values())) for row in case["input"]["data"]]
    assert [expand_counts(row) for row in rows] == case["expected"]["value"]


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2(3)", "2(x3", "-1", "2,,2", "2(x99999999)"])
def test_a_malformed_task_count_is_quoted(text):
    with pytest.raises(UsageError) as caught:
        expand_counts(text)
    assert repr(text) in str(caught.value)


def test_topology_refuses_a_second_name(repository):
    done = subprocess.run(
        [sys.executable, "-c", "import topology"],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 1
    assert "ImportError: this package is commkit.topology, not topology" in done.stderr
