"""Ranks under a real mpiexec, MPICH's and Open MPI's, with and without mpi4py."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from mpi_jobs import RANK, Mpiexec

from commkit import records

pytestmark = pytest.mark.timeout(120)

EACH = [
    pytest.param("mpich", marks=pytest.mark.mpiexec),
    pytest.param("openmpi", marks=pytest.mark.openmpi),
]


@pytest.fixture(params=EACH)
def mpi(request, repository, tmp_path):
    program = request.getfixturevalue("mpiexec" if request.param == "mpich" else "openmpi")
    made = Mpiexec(request.param, program, repository, tmp_path)
    yield made
    made.close()


def wait_for(run, count, key="epoch"):
    deadline = time.monotonic() + 40
    while len(run.lines(key)) < count:
        assert time.monotonic() < deadline and run.process.poll() is None, run.lines(key)
        time.sleep(0.02)
    return run.lines(key)


@pytest.mark.parametrize("before", ["", "from mpi4py import MPI"], ids=["without", "with-mpi4py"])
def test_four_ranks_of_one_host_join(mpi, before):
    found = mpi.python(4, before=before).results()
    assert [line["rank"] for line in found] == [0, 1, 2, 3]
    # Open MPI numbers the local ranks of an oversubscribed host 0, 2, 1, 3: its word is kept.
    assert [line["local"] for line in found] == [line["told_local"] for line in found]
    assert sorted(line["local"] for line in found) == [0, 1, 2, 3]
    assert {(line["size"], line["hosts"]) for line in found} == {(4, 1)}
    assert {line["launcher"] for line in found} == {mpi.name}
    assert len({line["epoch"] for line in found}) == 1
    assert {line["mpi4py"] for line in found} == {bool(before)}


def test_hosts_that_nothing_names_meet_by_one_broadcast_of_mpi(mpi):
    """Without the counts a host, commkit cannot know that there is one host only."""
    rank = f"int(os.environ['{RANK[mpi.name]}'])"
    one = f"import os; os.environ['COMMKIT_HOST_ID'] = 'host-' + str({rank} % 2)"
    found = mpi.python(4, hide_local=True, before=one).results()
    assert [line["root"] for line in found] == ["mpi"] * 4
    assert {line["mpi4py"] for line in found} == {True}
    assert {(line["hosts"], line["size"]) for line in found} == {(2, 2)}
    assert [line["local"] for line in found] == [0, 0, 1, 1]


@pytest.mark.mpiexec
def test_gforker_which_exports_no_local_ranks_starts_four(mpiexec, repository, tmp_path):
    gforker = Path(mpiexec).with_name("mpiexec.gforker")
    if not gforker.exists():
        pytest.skip("this MPICH has no mpiexec.gforker")
    run = Mpiexec("mpich", gforker, repository, tmp_path).python(4)
    found = run.results()
    assert [line["local"] for line in found] == [0, 1, 2, 3]
    assert {line["hosts"] for line in found} == {1}


def test_two_jobs_of_one_host_do_not_meet(mpi, tmp_path):
    """Nothing in the environment of Hydra's ranks tells two jobs apart."""
    first = mpi.python(3, "stay", job="a")
    lines = wait_for(first, 3)
    # The first job is alive when the second comes and goes.
    second = mpi.python(3, job="b").results()
    assert first.process.poll() is None
    (tmp_path / "go").touch()
    assert first.results() == lines
    for found, job in ((lines, "a"), (second, "b")):
        for line in found:
            assert line["names"] == [f"{rank} of {job}" for rank in range(3)]
    assert len({line["job"] for line in lines} | {line["job"] for line in second}) == 2
    assert len({line["epoch"] for line in lines} | {line["epoch"] for line in second}) == 2


def test_a_killed_rank_ends_the_job_and_leaves_no_agent(mpi):
    """The launcher ends the others; what the agent does about it, conftest.py looks at."""
    run = mpi.python(4, "watch")
    os.kill(wait_for(run, 4)[1]["pid"], signal.SIGKILL)
    run.process.communicate(timeout=30)
    assert run.process.returncode != 0


@pytest.mark.openmpi
def test_a_killed_rank_is_named_where_mpiexec_lets_the_others_live(openmpi, repository, tmp_path):
    run = Mpiexec("openmpi", openmpi, repository, tmp_path).python(
        4, "watch", flags=["--continuous"]
    )
    victim = wait_for(run, 4)[1]
    os.kill(victim["pid"], signal.SIGKILL)
    run.process.communicate(timeout=30)
    told = run.lines("error")
    assert told and {line["error"] for line in told} == {"RankDied"}
    for line in told:
        assert line["text"].startswith(f"rank 1 (pid {victim['pid']}"), line


def test_the_bench_under_mpiexec_writes_one_record_a_size_and_buffer(mpi, tmp_path):
    bench = ("-m", "commkit", "bench", "all_reduce", "-b", "8", "-e", "4K", "-f", "512", "-n", "3")
    process = mpi.start(2, sys.executable, *bench, "--json", "out.jsonl").process
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "2 ranks on 1 host" in out
    found = list(records.read(tmp_path / "out.jsonl"))
    assert [record.bytes for record in found] == [8, 8, 4096, 4096]
    assert {(record.world_size, record.wrong) for record in found} == {(2, 0)}
