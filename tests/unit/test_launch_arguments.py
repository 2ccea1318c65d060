"""Who wins: arguments, init_method, torch's variables, launchers; and what half an answer gets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from commkit.errors import CommkitError, LaunchError, UsageError
from commkit.launch import RootHint, resolve

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
ELASTIC = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "j1"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_UID": "1000",
}


def test_plain_python_is_a_world_of_one_that_needs_no_network():
    spec = resolve({})
    assert (spec.launcher, spec.rank, spec.world_size) == ("none", 0, 1)
    assert (spec.local_rank, spec.local_world_size) == (0, 1)
    assert spec.root == RootHint("local")
    assert spec.doubts == spec.ignored == ()


def test_two_worlds_of_one_never_share_a_name():
    ask = "from commkit.launch import resolve; print(resolve({'COMMKIT_JOB_ID': 'x'}).job_id)"
    names = {
        subprocess.run(
            [sys.executable, "-c", ask], capture_output=True, text=True, timeout=50, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(names) == 2
    assert resolve({}).job_id == resolve({}).job_id  # within one process: the next epoch


def test_torchs_variables_are_an_endpoint_that_rank_0_opens():
    spec = resolve(TORCH)
    assert spec.root == RootHint("endpoint", "n1", (29500,), here=None)
    assert spec.origins["root"] == "MASTER_ADDR=n1 MASTER_PORT=29500"


def test_torchruns_store_owns_the_port():
    assert resolve({**TORCH, **ELASTIC}).root == RootHint("elastic", "n1", (29500,))
    assert resolve({**TORCH, "TORCHELASTIC_USE_AGENT_STORE": "False"}).root.kind == "endpoint"


def test_a_stale_agent_store_variable_is_doubtful():
    spec = resolve({**TORCH, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert spec.root.kind == "elastic"
    assert any("torchrun did not start this process" in doubt for doubt in spec.doubts)


def test_commkit_port_replaces_the_roots_port():
    assert resolve({**TORCH, "COMMKIT_PORT": "9000"}).root.ports == (9000,)
    assert resolve({**SLURM, "COMMKIT_PORT": "9000"}).root.ports == (9000,)
    without = {k: v for k, v in TORCH.items() if k != "MASTER_PORT"}
    assert resolve({**without, "COMMKIT_PORT": "9000"}).root.ports == (9000,)


def test_commkit_job_id_names_the_job():
    assert resolve(SLURM).job_id == "7.0"
    assert resolve({**SLURM, "COMMKIT_JOB_ID": "mine"}).job_id == "mine"


def test_a_requeued_slurm_job_has_another_name():
    assert resolve({**SLURM, "SLURM_RESTART_COUNT": "1"}).job_id == "7.0.r1"


def test_a_step_on_one_host_needs_no_network():
    env = {**SLURM, "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "4"}
    assert resolve({**env, "SLURM_NODEID": "0"}).root == RootHint("local")


def test_arguments_win_over_the_environment():
    spec = resolve(TORCH, rank=2, world_size=3)
    assert (spec.launcher, spec.rank, spec.world_size) == ("arguments", 2, 3)
    assert spec.origins["rank"] == "argument rank=2"
    assert spec.root.host == "n1"


def test_one_argument_leaves_the_other_to_torchs_variable():
    assert (resolve(TORCH, rank=2).rank, resolve(TORCH, rank=2).world_size) == (2, 4)
    assert (resolve(TORCH, world_size=3).rank, resolve(TORCH, world_size=3).world_size) == (1, 3)
    half = {k: v for k, v in TORCH.items() if k != "RANK"}
    assert resolve(half, rank=0).world_size == 4


def test_arguments_with_an_endpoint_in_the_environment_need_no_ranks_there():
    env = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    spec = resolve(env, rank=0, world_size=2)
    assert spec.root == RootHint("endpoint", "n1", (29500,))
    assert not any("not used" in doubt for doubt in spec.doubts)


def test_a_permuted_rank_keeps_its_place_and_every_rank_names_the_job_alike():
    same, moved = resolve(SLURM, rank=3, world_size=4), resolve(SLURM, rank=0, world_size=4)
    assert same.job_id == moved.job_id == "7.0"
    assert (moved.rank, moved.local_rank, moved.local_world_size) == (0, 1, 2)
    assert (moved.root.host, moved.root.here) == ("n1", False)


def test_another_world_than_the_launchers_takes_no_places_from_it():
    env = {**SLURM, "MASTER_ADDR": "n9", "MASTER_PORT": "29500"}
    spec = resolve(env, rank=5, world_size=16)
    assert (spec.local_rank, spec.local_world_size, spec.job_id) == (None, None, "")


@pytest.mark.parametrize("url", ["tcp://n1:29500?rank=1&world_size=2", "tcp://n1:29500"])
def test_tcp_takes_its_numbers_from_the_url_or_the_arguments(url):
    numbers = {} if "?" in url else {"rank": 1, "world_size": 2}
    spec = resolve({}, init_method=url, **numbers)
    assert (spec.rank, spec.world_size) == (1, 2)
    assert spec.root == RootHint("endpoint", "n1", (29500,))


def test_tcp_at_torchruns_own_endpoint_uses_torchruns_store():
    url = "tcp://n1:29500"
    assert resolve({**TORCH, **ELASTIC}, init_method=url, rank=1, world_size=4).root.kind == (
        "elastic"
    )
    spec = resolve({**TORCH, **ELASTIC}, init_method="tcp://n1:29501", rank=1, world_size=4)
    assert spec.root == RootHint("endpoint", "n1", (29501,))


def test_a_file_is_the_meeting_place():
    spec = resolve(SLURM, init_method="file:///data/meet", rank=1, world_size=2)
    assert spec.root == RootHint("file", path="/data/meet")
    assert spec.job_id == ""


def test_env_urls_may_carry_the_numbers():
    spec = resolve(TORCH, init_method="env://?rank=0&world_size=2")
    assert (spec.rank, spec.world_size) == (0, 2)


@pytest.mark.parametrize(
    ("method", "rank", "size", "words"),
    [
        ("tcp://n1:29500?rank=0&world_size=2", 0, 2, "give them in one place"),
        ("env://?rank=0", -1, 2, "give them in one place"),
        ("tcp://n1:29500", -1, -1, "needs rank: pass rank="),
        ("tcp://n1:29500", 0, -1, "needs world_size: pass world_size="),
        ("tcp://n1", 0, 2, "port is missing"),
        ("tcp://n1:99999", 0, 2, "1-65535"),
        ("file:///x", 0, -1, "needs world_size"),
        ("file://x/y", 0, 2, "three slashes"),
        ("zeus://x", 0, 2, "expected env://, tcp://HOST:PORT or file:///PATH"),
        ("tcp://n1:1?color=2", 0, 2, "'color=2': expected rank=NUMBER"),
        ("tcp://n1:1?rank=x", -1, 2, "'rank=x': expected rank=NUMBER"),
        (None, 2, 2, "rank=2: expected less than world_size=2"),
        (None, -2, 2, "rank=-2: expected 0 or more"),
        (None, 0, 0, "world_size=0: expected 1 or more"),
        (None, 0, -1, "world_size= was not given"),
        (None, -1, 2, "rank= was not given"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(method, rank, size, words):
    with pytest.raises(UsageError) as caught:
        resolve({}, init_method=method, rank=rank, world_size=size)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "x"}, "RANK='x': expected a whole number"),
        ({"RANK": "-1"}, "RANK='-1': expected a whole number"),
        ({"RANK": "1.0"}, "RANK='1.0': expected a whole number"),
        ({"RANK": "4"}, "RANK=4 does not fit WORLD_SIZE=4"),
        ({"WORLD_SIZE": "0"}, "RANK=1 does not fit WORLD_SIZE=0"),
        ({"RANK": ""}, "RANK is not set, though"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set, though RANK=1"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set, though WORLD_SIZE=4"),
        ({"MASTER_PORT": ""}, "MASTER_ADDR='n1' is set, but MASTER_PORT is not"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT='0': expected a port, 1-65535"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT='abc': expected a port, 1-65535"),
        ({"MASTER_ADDR": "n1:29500"}, "MASTER_ADDR='n1:29500': expected a host without a port"),
        ({"MASTER_ADDR": "a b"}, "MASTER_ADDR='a b': expected a host name"),
        ({"RANK": "", "WORLD_SIZE": ""}, "MASTER_ADDR='n1' is set, but RANK and WORLD_SIZE"),
        ({"COMMKIT_LAUNCHER": "slurm"}, "COMMKIT_LAUNCHER='slurm', but slurm has not set"),
        ({"COMMKIT_PORT": "x"}, "COMMKIT_PORT='x'"),
    ],
)
def test_a_wrong_variable_is_one_line_with_its_value(change, words):
    with pytest.raises(LaunchError) as caught:
        resolve({**TORCH, **change})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


def test_arguments_do_not_care_about_an_environment_they_do_not_need():
    spec = resolve({"OMPI_COMM_WORLD_RANK": "x"}, init_method="tcp://n1:1", rank=0, world_size=2)
    assert any("OMPI_COMM_WORLD_RANK='x'" in doubt for doubt in spec.doubts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": "8"}, "LOCAL_RANK=8 does not fit LOCAL_WORLD"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 does not fit WORLD_"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 does not fit WORLD_SIZE=4"),
    ],
)
def test_impossible_local_values_are_dropped_with_a_doubt(change, words):
    spec = resolve({**TORCH, **change})
    assert (spec.local_rank, spec.local_world_size) == (None, None)
    assert any(words in doubt for doubt in spec.doubts)


def test_a_loopback_root_of_several_hosts_is_doubtful():
    env = {**SLURM, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert any("MASTER_ADDR=localhost" in doubt for doubt in resolve(env).doubts)
    one = {**env, "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "4"}
    assert not any("MASTER_ADDR=localhost" in doubt for doubt in resolve(one).doubts)


def test_slurms_name_for_this_host_decides_over_a_wrong_index():
    spec = resolve({**SLURM, "SLURMD_NODENAME": "n1"})
    assert spec.root.here is True
    assert any("SLURMD_NODENAME=n1" in doubt for doubt in spec.doubts)


# --- Kubernetes ---------------------------------------------------------------------------------

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
ROOT = {"MASTER_ADDR": "job-0.svc", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "rank", "size", "host"),
    [
        ({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", **ROOT}, 2, 4, "job-0.svc"),
        # JobSet: the manifest maps the completion index to RANK.
        (
            {"JOB_COMPLETION_INDEX": "1", "RANK": "1", "WORLD_SIZE": "2", **ROOT},
            1,
            2,
            "job-0.svc",
        ),
        # Kubeflow's PyTorchJob, one process a pod.
        (
            {"RANK": "1", "WORLD_SIZE": "3", "PET_NNODES": "3", "PET_NODE_RANK": "1", **ROOT},
            1,
            3,
            "job-0.svc",
        ),
        # Kubeflow's Trainer, one process a pod.
        (
            {
                "PET_NNODES": "3",
                "PET_NODE_RANK": "2",
                "PET_NPROC_PER_NODE": "1",
                "PET_MASTER_ADDR": "t-0-0.t",
                "PET_MASTER_PORT": "29400",
            },
            2,
            3,
            "t-0-0.t",
        ),
    ],
    ids=["indexed-job", "jobset", "pytorchjob", "trainer"],
)
def test_pods_are_ranks_and_their_names_may_take_a_while(env, rank, size, host):
    spec = resolve({**POD, **env})
    assert (spec.launcher, spec.rank, spec.world_size) == ("kubernetes", rank, size)
    assert (spec.root.kind, spec.root.host) == ("endpoint", host)
    assert spec.patient_dns
    assert spec.local_rank is None


def test_names_outside_kubernetes_resolve_at_once_or_not_at_all():
    assert not resolve(TORCH).patient_dns
    assert resolve({**TORCH, **POD}).patient_dns


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"JOB_COMPLETION_INDEX": "2", **ROOT}, "WORLD_SIZE is not set, though JOB_COMPLETION"),
        ({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"}, "MASTER_ADDR is not set"),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}, "torchrun"),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "1:4", **ROOT}, "PET_NNODES='1:4'"),
        (
            {
                "RANK": "1",
                "WORLD_SIZE": "16",
                "PET_NODE_RANK": "1",
                "PET_NPROC_PER_NODE": "8",
                **ROOT,
            },
            "PET_NPROC_PER_NODE='8'",
        ),
    ],
)
def test_a_pod_that_torchrun_should_have_split_or_that_lacks_numbers_is_refused(env, words):
    with pytest.raises(LaunchError) as caught:
        resolve({**POD, **env})
    assert words in str(caught.value)


def test_torchrun_in_a_pod_is_torchrun():
    env = {**POD, **TORCH, **ELASTIC, "LOCAL_RANK": "1", "PET_NODE_RANK": "0"}
    env |= {"PET_NPROC_PER_NODE": "4", "JOB_COMPLETION_INDEX": "0"}
    spec = resolve(env)
    assert (spec.launcher, spec.rank, spec.patient_dns) == ("torchrun", 1, True)


# --- The process's own environment ---------------------------------------------------------------


def test_the_process_environment_is_the_default(monkeypatch):
    for name, value in TORCH.items():
        monkeypatch.setenv(name, value)
    assert resolve().rank == 1
    assert os.environ["RANK"] == "1"


@pytest.mark.parametrize("size", range(0, 13, 3))
def test_any_missing_subset_gives_a_spec_or_one_error(size):
    # Drop variables one after another from a full step: never a traceback of another kind.
    names = list(SLURM)
    for start in range(len(names)):
        gone = {names[(start + i) % len(names)] for i in range(size)}
        env = {k: v for k, v in SLURM.items() if k not in gone}
        try:
            spec = resolve(env)
        except CommkitError as error:
            assert "\n" not in str(error)
        else:
            assert 0 <= spec.rank < spec.world_size
