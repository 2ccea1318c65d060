"""Reported environments that other libraries misread (tests/cases/env-parse.json)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commkit import endpoint, launch
from commkit.errors import LaunchError
from commkit.launch import resolve

CASES = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).resolve().parent.parent / "cases" / "env-parse.json").read_text()
    )
}
ENDPOINT = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "23456"}
STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_JOB_UID": "1000"}


def _data(name, row=None):
    data = CASES[name]["input"]["data"]
    return dict(data if row is None else data[row])


def _value(name):
    return CASES[name]["expected"]["value"]


def test_env_01_commas_inside_brackets_do_not_separate_hosts():
    env = {**STEP, **_data("ENV-01"), "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    env |= {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert resolve(env).root.host == _value("ENV-01")["first"]


@pytest.mark.parametrize("text", [t for t in CASES["ENV-08"]["input"]["data"] if t])
def test_env_08_a_malformed_node_list_is_one_error_that_names_the_variable(text):
    env = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": text}
    with pytest.raises(LaunchError) as caught:
        resolve(env)
    assert f"SLURM_STEP_NODELIST: host list {text!r}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_env_08_an_empty_node_list_counts_as_unset():
    env = {**STEP, **ENDPOINT, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    spec = resolve({**env, "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""})
    assert (spec.launcher, spec.world_size, spec.root.host) == ("slurm", 2, "10.0.0.9")


@pytest.mark.parametrize("row", range(4))
def test_env_10_tasks_per_node_is_run_length_encoded(row):
    counts = _value("ENV-10")[row]
    name, text = next(iter(_data("ENV-10", row).items()))
    for node, count in enumerate(counts):
        env = {**STEP, name: text, "SLURM_NTASKS": str(sum(counts)), "SLURM_PROCID": "0"}
        env |= {"SLURM_JOB_NODELIST": f"n[1-{len(counts)}]", "SLURM_NODEID": str(node)}
        spec = resolve(env)
        assert spec.local_world_size == count
        assert spec.origins["local_world_size"] == f"{name}={text}"


def test_env_10_counts_that_do_not_add_up_are_an_error():
    env = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "5"}
    env |= {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[1-2]"}
    with pytest.raises(LaunchError, match=r"'2\(x2\)' makes 4 tasks, but SLURM_STEP_NUM_TASKS=5"):
        resolve(env)


def test_counts_for_another_number_of_hosts_are_an_error():
    env = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    env |= {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[1-3]"}
    with pytest.raises(LaunchError, match=r"is for 2 hosts, but SLURM_STEP_NODELIST='n\[1-3\]'"):
        resolve(env)


def test_env_11_step_variables_win_over_job_variables():
    spec = resolve(_data("ENV-11"))
    expected = _value("ENV-11")
    for name in ("world_size", "local_world_size", "rank", "local_rank"):
        assert getattr(spec, name) == expected[name]
    assert (spec.root.host, spec.root.here) == (expected["nodes"][0], None)
    assert any("neither SLURM_NODEID nor SLURMD_NODENAME" in doubt for doubt in spec.doubts)
    assert spec.origins["world_size"] == "SLURM_STEP_NUM_TASKS=4"


def test_env_12_the_root_is_on_the_first_listed_host_wherever_rank_0_is():
    data = _data("ENV-12")
    listed = ["cp-112", "cp-240", "cp-305", "cp-411"]  # Slurm prints them sorted
    roots = set()
    for rank, host in enumerate(data["SLURM_HOSTFILE_content"]):
        env = {**STEP, "SLURM_STEP_NODELIST": data["SLURM_JOB_NODELIST"]}
        env |= {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_STEP_NUM_TASKS": "4"}
        env |= {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(listed.index(host))}
        spec = resolve({**env, "SLURMD_NODENAME": host})
        assert spec.root.here is (host == "cp-112")
        roots.add((spec.root.kind, spec.root.host, spec.root.ports))
        if spec.rank == 0:
            assert host == _value("ENV-12")["rank0_host"]
    assert len(roots) == 1
    assert next(iter(roots))[:2] == ("endpoint", "cp-112")


def test_env_13_an_allocation_without_srun_is_a_world_of_one_and_says_so():
    spec = resolve(_data("ENV-13", 0))
    assert (spec.launcher, spec.world_size) == ("none", 1)
    assert len(spec.doubts) == 1
    assert "SLURM_NTASKS=8" in spec.doubts[0]
    assert "not started by srun" in spec.doubts[0]


def test_env_13_srun_inside_an_interactive_job_is_srun():
    spec = resolve({**_data("ENV-13", 1), **ENDPOINT})
    assert (spec.launcher, spec.rank, spec.world_size) == ("slurm", 5, 8)


def test_env_13_a_terminal_among_several_tasks_needs_a_word_from_the_user():
    env = {**_data("ENV-13", 1), **ENDPOINT, "SLURM_PTY_PORT": "4711"}
    with pytest.raises(LaunchError, match="SLURM_PTY_PORT.*COMMKIT_LAUNCHER=none"):
        resolve(env)
    assert resolve({**env, "COMMKIT_LAUNCHER": "slurm"}).world_size == 8
    assert resolve({**env, "COMMKIT_LAUNCHER": "none"}).world_size == 1


@pytest.mark.parametrize("step", ["4294967290", "4294967291", "4294967292"])
def test_env_13_slurms_own_steps_are_not_srun(step):
    env = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": step, "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert resolve({**env, "SLURM_STEP_NUM_TASKS": "4"}).launcher == "none"


def test_env_14_a_complete_torchrun_family_wins_over_the_srun_around_it():
    env = {**_data("ENV-14"), "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "9"}
    spec = resolve(env)
    for name, value in _value("ENV-14").items():
        assert getattr(spec, name) == value
    assert spec.job_id == "j1"
    assert "SLURM_PROCID=1" in spec.ignored
    assert "SLURM_NTASKS=2" in spec.ignored


def test_env_14_a_stray_rank_loses_against_a_complete_srun_and_is_named():
    env = {**STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
    env |= {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    spec = resolve({**env, "RANK": "11"})
    assert (spec.launcher, spec.rank) == ("slurm", 1)
    assert spec.ignored == ("RANK=11",)
    assert any("RANK=11 is ignored" in doubt for doubt in spec.doubts)


def test_env_16_a_rank_without_a_size_is_never_a_world_of_one():
    with pytest.raises(LaunchError, match="PMIX_RANK=1: the world size is unknown; set WORLD_SIZE"):
        resolve(_data("ENV-16", 0))
    spec = resolve({**_data("ENV-16", 0), **ENDPOINT, "WORLD_SIZE": "4"})
    assert (spec.launcher, spec.rank, spec.world_size) == ("pmix", 1, 4)
    assert spec.job_id == "prterun-x@1"


@pytest.mark.parametrize(
    ("row", "launcher"), [(1, "openmpi"), (2, "mpich"), (3, "mpich")], ids=["ompi", "pmi", "mv2"]
)
def test_env_16_each_mpi_family_is_read_from_its_own_variables(row, launcher):
    spec = resolve({**_data("ENV-16", row), **ENDPOINT})
    assert spec.launcher == launcher
    for name, value in _value("ENV-16")[row].items():
        assert getattr(spec, name) == value
    if "local_rank" not in _value("ENV-16")[row]:
        assert spec.local_rank is None


def test_env_17_a_local_rank_beyond_the_local_size_drops_both():
    for row, data in enumerate(CASES["ENV-17"]["input"]["data"]):
        env = {k: v for k, v in data.items() if k != "host"}
        spec = resolve({**env, **ENDPOINT, "PMI_SIZE": "4"})
        assert spec.rank == int(data["PMI_RANK"])
        if row % 2:  # the second rank of each host
            assert (spec.local_rank, spec.local_world_size) == (None, None)
            assert any("MPI_LOCALRANKID=1 does not fit MPI_LOCALNRANKS=1" in d for d in spec.doubts)
        # Never taken for a job on one host.
        assert spec.root.kind == "endpoint"


def test_env_19_nothing_is_executed_and_path_is_not_needed(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a process was started")

    for name in ("system", "popen", "fork", "posix_spawn", "posix_spawnp", "execvp"):
        monkeypatch.setattr(launch.os, name, refuse)
    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.setenv("PATH", "")
    spec = resolve({})
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert spec.host.boot_id == boot


def test_env_20_a_missing_local_rank_stays_unknown_until_hosts_are_compared():
    data = _data("ENV-20")
    spec = resolve({"RANK": data["RANK"], "WORLD_SIZE": data["WORLD_SIZE"], **ENDPOINT})
    assert (spec.rank, spec.world_size) == (3, 6)
    assert (spec.local_rank, spec.local_world_size) == (None, None)


def _slurm_rank(**more):
    env = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    env |= {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NODEID": "0", "SLURM_JOB_UID": "1000"}
    return {**env, **more}


def test_env_23_derived_ports_differ_between_jobs_steps_and_users(monkeypatch):
    monkeypatch.setattr(launch, "ephemeral_range", lambda: (20000, 40000))
    seen = {
        resolve(_slurm_rank(**row)).root.ports
        for row in (
            _data("ENV-23", 0),
            _data("ENV-23", 1),
            {**_data("ENV-23", 0), "SLURM_STEP_ID": "1"},
            {**_data("ENV-23", 0), "SLURM_JOB_UID": "1001"},
        )
    }
    assert len(seen) == 4
    for ports in seen:
        assert len(ports) == launch.ROOT_PORTS
        assert not any(20000 <= port <= 40000 for port in ports)


def test_env_23_all_ranks_derive_the_same_sequence():
    specs = [
        resolve({**_slurm_rank(**_data("ENV-23", 0)), "SLURM_PROCID": r, "SLURM_NODEID": r})
        for r in ("0", "1")
    ]
    assert specs[0].root.ports == specs[1].root.ports
    assert [spec.root.here for spec in specs] == [True, False]


def test_env_23_what_the_user_sets_always_wins():
    spec = resolve(_slurm_rank(**_data("ENV-23", 2)))
    assert (spec.root.host, spec.root.ports, spec.root.here) == ("10.0.0.9", (23456,), None)


def test_a_host_where_every_port_is_ephemeral_asks_for_commkit_port(monkeypatch):
    monkeypatch.setattr(launch, "ephemeral_range", lambda: (1024, 65535))
    env = _slurm_rank(SLURM_JOB_ID="7")
    with pytest.raises(LaunchError, match="COMMKIT_PORT"):
        resolve(env)
    assert resolve({**env, "COMMKIT_PORT": "9000"}).root.ports == (9000,)
    assert endpoint.EPHEMERAL_FILE == "/proc/sys/net/ipv4/ip_local_port_range"
