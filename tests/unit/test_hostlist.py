"""Slurm's notations, against what Slurm itself prints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commkit.errors import UsageError
from commkit.topology.hostlist import MAX_HOSTS, MAX_RANGE, compress, expand, expand_counts

TESTS = Path(__file__).resolve().parent.parent
RECORDED = json.loads((TESTS / "recorded" / "scontrol.json").read_text())["expanded"]
#: Names that fold into ranges of all kinds.
NEIGHBOURS = [
    f"{name}{i:0{w}d}" for name in ("n", "n0", "a-1-") for w in (1, 2, 3) for i in range(8, 13)
]
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
        (" ", " "),
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


def test_blanks_outside_brackets_separate_names_as_commas_do():
    assert expand("a, b[1-2]\tc\nd") == ["a", "b1", "b2", "c", "d"]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.from_regex(r"[a-z0-9.-]{1,4}[0-9]{0,3}", fullmatch=True) | st.sampled_from(NEIGHBOURS),
        min_size=1,
        max_size=30,
    )
)
def test_a_compressed_list_expands_to_the_same_names_in_the_same_order(names):
    assert expand(compress(names)) == names


def test_runs_of_numbers_are_folded_and_padding_is_kept():
    assert compress(["n1", "n2", "n10", "n08", "n09", "n10", "x"]) == "n[1-2,10,08-10],x"
    assert compress(["gpu-007"]) == "gpu-007"
    assert compress([f"n{i}" for i in range(MAX_RANGE + 2)]) == "n[0-65535,65536-65537]"


@pytest.mark.parametrize("names", [[], [""], ["a b"], ["a,b"], ["n[1]"], ["a", "b]"]])
def test_a_name_that_a_list_cannot_hold_is_refused(names):
    with pytest.raises(UsageError, match="expected"):
        compress(names)


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory):
    """The real `scontrol show hostnames`: list -> names."""
    program = shutil.which("scontrol")
    if program is None:
        pytest.skip("no scontrol (Debian: slurm-client)")
    conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=x\n")

    def run(text):
        done = subprocess.run(
            [program, "show", "hostnames", text],
            env={**os.environ, "SLURM_CONF": str(conf)},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    return run


RANGES = st.tuples(st.integers(0, 300), st.integers(0, 12), st.integers(0, 4), st.booleans()).map(
    lambda r: f"{r[0]:0{r[2]}d}" + ("" if r[3] else f"-{r[0] + r[1]}")
)
BRACKETS = st.lists(RANGES, min_size=1, max_size=3).map(lambda some: f"[{','.join(some)}]")
NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,3}", fullmatch=True)
# No name behind the last bracket: Slurm 22.05 refuses that, newer ones do not.
ITEMS = NAMES | st.lists(st.tuples(NAMES, BRACKETS).map("".join), min_size=1, max_size=3).map(
    "".join
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ITEMS, min_size=1, max_size=3), st.sampled_from([",", ", ", " ", "\t"]))
def test_any_list_expands_as_the_real_scontrol_expands_it(scontrol, items, separator):
    text = separator.join(items)
    assert expand(text) == scontrol(text)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(NEIGHBOURS), min_size=1, max_size=30))
def test_the_real_scontrol_expands_what_we_compress(scontrol, names):
    assert scontrol(compress(names)) == names


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
