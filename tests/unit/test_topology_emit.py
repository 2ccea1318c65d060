"""Placements as files; tests/loopback/test_emitted_files.py hands them to launchers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commkit.errors import UsageError
from commkit.topology.emit import FORMATS, emit, permutation, read_permutation

GIVEN = ["a", "b", "c"]
HOST_OF = [2, 0, 1]  # logical host 0 is on c


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("hostfile", "c:2\na:2\nb:2\n"),
        ("openmpi", "c slots=2\na slots=2\nb slots=2\n"),
        ("slurm", "c\nc\na\na\nb\nb\n"),
        (
            "rankfile",
            "rank 0=c slot=0\nrank 1=c slot=1\nrank 2=a slot=0\n"
            "rank 3=a slot=1\nrank 4=b slot=0\nrank 5=b slot=1\n",
        ),
    ],
)
def test_files_list_hosts_by_logical_host(form, expected):
    assert emit(form, HOST_OF, GIVEN, 2) == expected


def test_a_permutation_says_which_rank_a_process_takes_on():
    perm = permutation(HOST_OF, GIVEN, 2)
    # The launcher's ranks 0, 1 are on a, which plays logical host 1.
    assert perm.rank == (2, 3, 4, 5, 0, 1)
    assert read_permutation(perm.text()) == perm


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.permutations(range(n)), st.integers(1, 4))))
def test_a_permutation_survives_writing_and_reading(drawn):
    host_of, each = drawn
    perm = permutation(host_of, [f"h{i}" for i in range(len(host_of))], each)
    assert sorted(perm.rank) == list(range(len(host_of) * each))
    assert [rank % each for rank in perm.rank] == [r % each for r in range(len(perm.rank))]
    again = read_permutation(emit("perm", host_of, perm.hosts, each))
    assert (again, again.digest) == (perm, perm.digest)


def test_digests_differ_if_anything_does():
    perms = [
        permutation(HOST_OF, GIVEN, 2),
        permutation(HOST_OF, GIVEN, 1),
        permutation([0, 1, 2], GIVEN, 2),
        permutation(HOST_OF, ["a", "b", "d"], 2),
    ]
    assert len({perm.digest for perm in perms}) == 4


def test_a_config_map_holds_hostfile_and_permutation():
    body = json.loads(emit("k8s", HOST_OF, GIVEN, 2, name="job-1"))
    assert (body["kind"], body["metadata"]) == ("ConfigMap", {"name": "job-1"})
    assert body["data"]["hostfile"] == emit("openmpi", HOST_OF, GIVEN, 2)
    assert read_permutation(body["data"]["placement.json"]).rank == (2, 3, 4, 5, 0, 1)
    with pytest.raises(UsageError, match="ConfigMap name 'Job_1'"):
        emit("k8s", HOST_OF, GIVEN, 2, name="Job_1")


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "perm"])
@pytest.mark.parametrize("name", ["a b", "a:2", "", "-x", "a\nb", "a=b"])
def test_names_that_would_break_a_file_are_refused(form, name):
    with pytest.raises(UsageError, match="host name"):
        emit(form, [0], [name], 1)


def change(**what):
    body = json.loads(permutation(HOST_OF, GIVEN, 2).text())
    return json.dumps({**body, **what})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        (change(format="other"), "expected a JSON object"),
        (change(version=2), "version 2: expected 1"),
        (change(rank=[0, 0, 1, 2, 3, 4]), "each of 0 to 5 once"),
        (change(rank=[0, 1, 2, 3]), "each of 0 to 5 once"),
        (change(rank=[1, 2, 3, 4, 5, 0]), "of host 'a' are not those of one host"),
        (change(rank=["0"]), "expected a list of ranks"),
        (change(rank=[True, False]), "expected a list of ranks"),
        (change(hosts="abc"), "expected a list of names"),
        (change(ranks_per_host=0), "ranks_per_host 0"),
        (change(hosts=["a", "b", "x"]), "digest does not fit"),
    ],
)
def test_a_wrong_permutation_file_is_named(text, expected):
    with pytest.raises(UsageError, match=expected) as caught:
        read_permutation(text, "plan.json")
    assert str(caught.value).startswith("plan.json: ")


def test_an_unknown_format_lists_what_there_is():
    with pytest.raises(UsageError, match="'yaml': expected one of hostfile"):
        emit("yaml", [0], ["a"], 1)
