"""The tuner plugin as NCCL calls it, in versions 3 to 6, under sanitizers (tests/cpp)."""

from __future__ import annotations

import os
import runpy
import subprocess
from types import SimpleNamespace

import pytest

# The first test of each kind also compiles.
pytestmark = pytest.mark.timeout(300)

TABLE = """\
commkit-tuner-table 1
allreduce 0..64K nodes=2.. -> tree ll
allreduce 64K..1M nodes=2.. -> ring simple channels=4 chunk=128K
allreduce 1M.. nodes=2.. -> nvls simple channels=8
allgather 0.. nodes=2.. registered=yes -> default channels=2
"""


@pytest.fixture(scope="module", params=["ADDRESS", "THREAD"])
def calls(request, repository):
    """Runs tests/cpp/tuner_calls.c with a table (None: none); what it printed."""
    programs = SimpleNamespace(**runpy.run_path(str(repository / "tests/cpp/native_programs.py")))
    sources = [*programs.tuner_sources(), repository / "tests/cpp/tuner_calls.c"]
    program = programs.build("tuner_calls", sources, getattr(programs, request.param))

    def run(table, *arguments, **variables):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "COMMKIT_"))}
        env |= variables | ({} if table is None else {"COMMKIT_TUNER_TABLE": str(table)})
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, env=env, timeout=120
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        assert not done.stderr
        return done.stdout

    return run


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table"
    path.write_text(TABLE)
    return path


def test_each_version_of_the_interface_gets_the_same_choices(calls, table):
    said = calls(table)
    assert "fingerprint" in said and "4 of 4 rows for 16 ranks on 2 nodes" in said
    # What NCCL cannot use stays unusable, and that is said once for each communicator.
    refused = f"{table}:4 not honoured: NCCL cannot use nvls with simple here; NCCL chooses"
    assert said.count(refused) == 8 * 20 * 4


def test_without_a_table_nothing_changes(calls):
    assert "COMMKIT_TUNER_TABLE is not set; NCCL chooses" in calls(None, "nothing")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file or directory"),
        (TABLE.replace("tree ll", "Tree ll"), ":2:31: algorithm 'Tree', expected one of tree,"),
        ("", "the file ends without the line 'commkit-tuner-table 1'"),
    ],
    ids=["missing", "misspelt", "empty"],
)
def test_a_table_that_cannot_be_read_is_not_used_at_all(calls, tmp_path, text, why):
    path = tmp_path / "table"
    if text is not None:
        path.write_text(text)
    said = calls(path, "nothing")
    assert said.startswith("WARN commkit tuner: ")
    assert str(path) in said and why in said and "the table is not used" in said


def test_an_empty_table_changes_nothing(calls, tmp_path):
    path = tmp_path / "table"
    path.write_text("commkit-tuner-table 1\n")
    assert "0 of 0 rows" in calls(path, "nothing")


def test_variables_that_nccl_heeds_first_are_named(calls, table):
    said = calls(table, NCCL_ALGO="Ring")
    assert "NCCL_ALGO=Ring is set, and NCCL heeds it before the table" in said
