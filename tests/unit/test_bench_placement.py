"""A world that fell apart is refused instead of measured N times; memory is read, not guessed."""

from __future__ import annotations

import pytest

from commkit.bench import device, placement
from commkit.errors import LaunchError, UsageError


@pytest.fixture
def alone(monkeypatch):
    """No process launcher above this test."""
    monkeypatch.setattr(placement, "siblings", lambda: "")


def test_a_process_by_itself_is_a_world_of_one(alone):
    place = placement.from_environment(0, {})
    assert (place.rank, place.world_size, place.init_method) == (0, 1, None)


@pytest.mark.parametrize(
    "environ", [{"SLURM_NTASKS": "8"}, {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}]
)
def test_a_batch_job_of_more_tasks_is_refused_without_its_launcher(alone, environ):
    with pytest.raises(LaunchError, match="SLURM_NTASKS=8, but this process is a world of one"):
        placement.from_environment(0, environ)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_launcher_that_may_not_be_read_still_counts(alone, name):
    with pytest.raises(LaunchError, match=f"{name}=2, but this process is a world of one"):
        placement.from_environment(0, {name: "2", "COMMKIT_LAUNCHER": "none"})


def test_one_rank_on_purpose_is_not_refused(alone):
    assert placement.from_environment(1, {"SLURM_NTASKS": "8"}).world_size == 1


@pytest.mark.parametrize("value", ["1", "", "4(x2)", "-3"])
def test_what_counts_no_more_than_one_is_no_hint(value):
    assert placement.more_than_one({"SLURM_NTASKS": value}) == ""


def test_local_ranks_inside_a_started_job_are_refused():
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    with pytest.raises(UsageError, match=r"--nproc 4: this process already is rank 1 of 2 \(WORLD"):
        placement.from_environment(4, environ)


@pytest.fixture
def processes(tmp_path):
    def make(*table):
        for pid, parent, name, command in table:
            entry = tmp_path / str(pid)
            entry.mkdir()
            (entry / "stat").write_text(f"{pid} ({name}) S {parent} 0 0\n")
            (entry / "comm").write_text(f"{name}\n")
            (entry / "cmdline").write_bytes(command.replace(" ", "\0").encode())
        (tmp_path / "self").mkdir()
        return tmp_path

    return make


BENCH = "python -m commkit bench all_reduce"


def test_ranks_of_another_mpi_are_seen_by_their_parent(processes):
    proc = processes(
        (10, 1, "hydra_pmi_proxy", "proxy"),
        (11, 10, "python", BENCH),
        (12, 10, "py) S 1 (", BENCH),
        (13, 10, "python", "python other.py"),
        (14, 1, "python", BENCH),
        (15, 10, "ssh", "ssh gpu-2 proxy"),
    )
    assert placement.siblings(11, proc) == "hydra_pmi_proxy (pid 10) started 3 processes"


@pytest.mark.parametrize("parent", ["bash", "pytest"])
def test_two_of_one_shell_are_two_on_purpose(processes, parent):
    proc = processes((10, 1, parent, "x"), (11, 10, "python", BENCH), (12, 10, "python", BENCH))
    assert placement.siblings(11, proc) == ""


def test_a_launcher_of_one_rank_is_no_hint(processes):
    proc = processes((10, 1, "mpirun", "mpirun -n 1"), (11, 10, "python", BENCH))
    assert placement.siblings(11, proc) == ""
    assert placement.siblings(99, proc) == ""


def files(root, **texts):
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_host_memory_is_what_the_kernel_calls_available(tmp_path):
    files(tmp_path, proc__meminfo="MemTotal: 100 kB\nMemAvailable:      64 kB\n")
    assert device.host_memory(tmp_path) == 64 << 10


def test_a_containers_limit_is_smaller_than_its_host(tmp_path):
    files(tmp_path, proc__meminfo="MemAvailable: 1000000 kB\n", proc__self__cgroup="0::/pod/a\n")
    group = tmp_path / "sys/fs/cgroup/pod/a"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("4096000\n")
    (group / "memory.current").write_text("3000000\n")
    assert device.host_memory(tmp_path) == 1_096_000
    (group / "memory.stat").write_text("anon 7\nactive_file 500\ninactive_file 500\n")
    assert device.host_memory(tmp_path) == 1_097_000
    (group / "memory.max").write_text("max\n")
    assert device.host_memory(tmp_path) == 1_000_000 << 10
