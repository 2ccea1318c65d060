"""Ranks without torch under a real mpiexec of MPICH, with and without mpi4py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commkit import records

pytestmark = [pytest.mark.mpiexec, pytest.mark.timeout(120)]

WORKER = """
import json, os, sys
{before}
from commkit import launch, overlay
spec = launch.resolve()
world = overlay.join(spec, 40.0)
me = world.identity
names = world.all_gather(f"{{me.rank}} of {{os.environ['JOB']}}".encode())
line = {{"rank": me.rank, "local": me.local_rank, "size": me.local_world_size, "epoch": me.epoch,
        "hosts": me.hosts, "launcher": spec.launcher, "root": spec.root.kind, "job": spec.job_id,
        "names": [name.decode() for name in names], "mpi4py": "mpi4py.MPI" in sys.modules}}
os.write(1, (json.dumps(line) + "\\n").encode())
if len(sys.argv) > 1:
    # A word on standard input, or its end, lets the job go on.
    sys.stdin.read() if me.rank == 0 else None
    world.barrier(timeout=40.0)
world.leave()
"""


@pytest.fixture
def start(mpiexec, repository, tmp_path):
    processes = []

    def call(*command, program=mpiexec, before="", job="a", **env):
        worker = tmp_path / f"worker-{job}.py"
        worker.write_text(WORKER.format(before=before))
        command = [str(worker) if word == "WORKER" else word for word in command]
        path = os.pathsep.join(filter(None, (str(repository), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            (program, *command),
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "JOB": job,
                "COMMKIT_LOG_DIR": str(tmp_path),
                **env,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield call
    for process in processes:
        # SIGTERM, so that it ends its ranks too.
        if process.poll() is None:
            process.terminate()
        process.communicate()


def results(process):
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return sorted(map(json.loads, out.splitlines()), key=lambda found: found["rank"])


@pytest.mark.parametrize("mpi", ["", "from mpi4py import MPI"], ids=["without", "with-mpi4py"])
def test_four_ranks_of_one_host_join(start, mpi):
    found = results(start("-n", "4", sys.executable, "WORKER", before=mpi))
    assert [line["rank"] for line in found] == [line["local"] for line in found] == [0, 1, 2, 3]
    assert {(line["launcher"], line["size"], line["hosts"]) for line in found} == {("mpich", 4, 1)}
    assert len({line["epoch"] for line in found}) == 1
    assert {line["mpi4py"] for line in found} == {bool(mpi)}


def test_hosts_that_nothing_names_meet_by_one_broadcast_of_mpi(start):
    """Without the counts a host, commkit cannot know that there is one host only."""
    one = (
        "import os; os.environ['COMMKIT_HOST_ID'] = 'host-' + str(int(os.environ['PMI_RANK']) % 2)"
    )
    hide = ("env", "-u", "MPI_LOCALNRANKS", "-u", "MPI_LOCALRANKID")
    found = results(start("-n", "4", *hide, sys.executable, "WORKER", before=one))
    assert [line["root"] for line in found] == ["mpi"] * 4
    assert {line["mpi4py"] for line in found} == {True}
    assert {(line["hosts"], line["size"]) for line in found} == {(2, 2)}
    assert [line["local"] for line in found] == [0, 0, 1, 1]


def test_gforker_which_exports_no_local_ranks_starts_four(start, mpiexec):
    gforker = Path(mpiexec).with_name("mpiexec.gforker")
    if not gforker.exists():
        pytest.skip("this MPICH has no mpiexec.gforker")
    found = results(start("-n", "4", sys.executable, "WORKER", program=str(gforker)))
    assert [line["local"] for line in found] == [0, 1, 2, 3]
    assert {line["hosts"] for line in found} == {1}


def test_two_jobs_of_one_host_do_not_meet(start):
    """Nothing in the environment of Hydra's ranks tells two jobs apart."""
    first = start("-n", "3", sys.executable, "WORKER", "stay", job="a")
    lines = [json.loads(first.stdout.readline()) for _ in range(3)]
    # The first job is alive when the second comes and goes.
    second = results(start("-n", "3", sys.executable, "WORKER", job="b"))
    assert first.poll() is None
    assert results(first) == []
    for found, job in ((lines, "a"), (second, "b")):
        for line in found:
            assert line["names"] == [f"{rank} of {job}" for rank in range(3)]
    assert len({line["job"] for line in lines} | {line["job"] for line in second}) == 2
    assert len({line["epoch"] for line in lines} | {line["epoch"] for line in second}) == 2


def test_the_bench_under_mpiexec_writes_one_record_a_size_and_buffer(start, tmp_path):
    bench = ("-m", "commkit", "bench", "all_reduce", "-b", "8", "-e", "4K", "-f", "512", "-n", "3")
    process = start("-n", "2", sys.executable, *bench, "--json", "out.jsonl")
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "2 ranks on 1 host" in out
    found = list(records.read(tmp_path / "out.jsonl"))
    assert [record.bytes for record in found] == [8, 8, 4096, 4096]
    assert {(record.world_size, record.wrong) for record in found} == {(2, 0)}
