"""Environments that real launchers gave to real ranks (tests/recorded/launch)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from commkit import launch
from commkit.errors import LaunchError
from commkit.launch import resolve

FOLDER = Path(__file__).resolve().parent.parent / "recorded" / "launch"
#: file -> (launcher, world size, local rank of each rank, ranks on each rank's host, kind of root)
EXPECTED = {
    "torchrun": ("torchrun", 2, [0, 1], [2, 2], "elastic"),
    "torchrun-static": ("torchrun", 2, [0, 1], [2, 2], "elastic"),
    "srun": ("slurm", 8, [0, 1] * 4, [2] * 8, "endpoint"),
    # hosts: gpu03 gpu04 gpu01 gpu01 gpu02
    "srun-arbitrary": ("slurm", 5, [0, 0, 0, 1, 0], [1, 1, 2, 2, 1], "endpoint"),
    "srun-smaller-step": ("slurm", 3, [0, 1, 0], [2, 2, 1], "endpoint"),
    "mpich": ("mpich", 2, [0, 1], [2, 2], "local"),
    "gforker": ("mpich", 2, [None, None], [None, None], "mpi"),
    "openmpi": ("openmpi", 2, [0, 1], [2, 2], "local"),
    "mpich-in-slurm": ("mpich", 4, [0, 1, 0, 1], [2] * 4, "mpi"),
    "openmpi-in-slurm": ("openmpi", 4, [0, 1, 0, 1], [2] * 4, "mpi"),
}


def environments(name):
    return json.loads((FOLDER / f"{name}.json").read_text())["environments"]


@pytest.fixture(autouse=True)
def _mpi4py(monkeypatch):
    """mpi4py is there, wherever these tests run."""
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: ModuleSpec(name, None))


def test_every_recording_is_tested():
    others = {"sbatch-script", "salloc-shell", "srun-pty"}
    assert {path.stem for path in FOLDER.iterdir()} == EXPECTED.keys() | others


@pytest.mark.parametrize("name", EXPECTED)
def test_every_rank_of_a_real_launcher_is_understood(name):
    launcher, size, local_ranks, local_sizes, kind = EXPECTED[name]
    specs = [resolve(env) for env in environments(name)]
    assert [spec.rank for spec in specs] == list(range(size))
    assert {(spec.launcher, spec.world_size, spec.root.kind) for spec in specs} == {
        (launcher, size, kind)
    }
    assert [spec.local_rank for spec in specs] == local_ranks
    assert [spec.local_world_size for spec in specs] == local_sizes
    # All ranks of a job must name it, and its root, alike.
    assert len({spec.job_id for spec in specs}) == 1
    assert len({(spec.root.host, spec.root.ports) for spec in specs}) == 1


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "gforker"])
def test_a_real_launcher_gives_the_job_a_name(name):
    assert all(resolve(env).job_id for env in environments(name))


def test_torchruns_shared_name_is_told_apart_by_its_port():
    env = environments("torchrun-static")[0]
    assert env["TORCHELASTIC_RUN_ID"] == "none"
    assert resolve(env).job_id != resolve({**env, "MASTER_PORT": "29578"}).job_id


def test_exactly_the_first_hosts_ranks_hold_the_root_whoever_rank_0_is():
    specs = [resolve(env) for env in environments("srun-arbitrary")]
    assert [spec.root.here for spec in specs] == [False, False, True, True, False]
    assert {spec.root.host for spec in specs} == {"gpu01"}


def test_a_step_on_part_of_the_job_has_its_own_first_host():
    specs = [resolve(env) for env in environments("srun-smaller-step")]
    assert {spec.root.host for spec in specs} == {"gpu02"}
    assert [spec.root.here for spec in specs] == [True, True, False]


@pytest.mark.parametrize(("name", "tasks"), [("sbatch-script", 8), ("salloc-shell", 4)])
def test_a_batch_script_and_sallocs_shell_are_worlds_of_one_with_a_warning(name, tasks):
    spec = resolve(environments(name)[0])
    assert (spec.launcher, spec.world_size, spec.root.kind) == ("none", 1, "local")
    assert [f"SLURM_NTASKS={tasks}" in doubt for doubt in spec.doubts] == [True]


def test_sruns_terminal_is_a_world_of_one_with_a_warning():
    spec = resolve(environments("srun-pty")[0])
    assert (spec.launcher, spec.world_size) == ("slurm", 1)
    assert any("SLURM_PTY_PORT" in doubt for doubt in spec.doubts)


@pytest.mark.parametrize("name", ["mpich-in-slurm", "openmpi-in-slurm"])
def test_the_step_of_mpiruns_daemons_is_not_the_world(name):
    # Two daemons, one a host, stand in the step; four ranks are below them.
    for env in environments(name):
        spec = resolve(env)
        assert spec.world_size == 4
        if "SLURM_STEP_ID" in env:
            assert any("daemon" in doubt for doubt in spec.doubts)
            assert f"SLURM_PROCID={env['SLURM_PROCID']}" in spec.ignored


@pytest.mark.parametrize("name", ["gforker", "mpich-in-slurm", "openmpi-in-slurm"])
def test_without_mpi4py_an_mpi_job_on_several_hosts_asks_for_an_endpoint(name, monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda _name: None)
    env = environments(name)[0]
    with pytest.raises(LaunchError, match="set MASTER_ADDR and MASTER_PORT.*or install mpi4py"):
        resolve(env)
    assert resolve({**env, "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}).root.host == "n1"


def test_commkit_launcher_reads_only_that_launcher():
    env = environments("mpich-in-slurm")[0] | {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    assert resolve({**env, "COMMKIT_LAUNCHER": "slurm"}).world_size == 2
    assert resolve({**env, "COMMKIT_LAUNCHER": "none"}).world_size == 1
    with pytest.raises(LaunchError, match="COMMKIT_LAUNCHER='openmpi'"):
        resolve({**env, "COMMKIT_LAUNCHER": "openmpi"})


ASK = "from commkit.launch import resolve; print(resolve().job_id)"


def test_two_hydra_jobs_on_one_host_have_different_names(repository):
    # A shell stands for Hydra's proxy: the ranks' parent, without their variables.
    line = "; ".join(
        f"PMI_RANK={r} PMI_SIZE=2 PMI_FD={9 + r} MPI_LOCALNRANKS=2 MPI_LOCALRANKID={r} "
        # A wrapper between launcher and rank, as numactl would be, and one rank without it.
        + ('sh -c \'"$0" -c "$1"; exit 0\' ' if r else "env ")
        + (f'"{sys.executable}" "$ASK"' if r else f'"{sys.executable}" -c "$ASK"')
        for r in range(2)
    )
    env = {**os.environ, "ASK": ASK, "PYTHONPATH": str(repository)}
    jobs = []
    for _ in range(2):
        done = subprocess.run(
            ["sh", "-c", line + "; true"], env=env, capture_output=True, text=True, timeout=50
        )
        first, second = done.stdout.split()
        assert first == second
        jobs.append(first)
    assert jobs[0] != jobs[1]
