"""Environments of pods, as the operators' sources put them there (tests/recorded/pods)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commkit.errors import LaunchError
from commkit.launch import resolve

FOLDER = Path(__file__).resolve().parent.parent / "recorded" / "pods"
#: file -> (launcher, host of the root, port of the root; 0: derived)
WORLDS = {
    "pytorchjob": ("kubernetes", "pytorch-simple-master-0", 23456),
    "trainjob": ("kubernetes", "mnist-node-0-0.mnist", 29500),
    "jobset": ("kubernetes", "pytorch-workers-0-0.pytorch", 3389),
    "leaderworkerset": ("kubernetes", "llm-0.llm.default", 0),
    # These write torch's own variables and nothing that shows who wrote them.
    "volcano": ("torchrun", "train-master-0.train", 23456),
    "ray-train": ("torchrun", "10.244.1.7", 41235),
}
#: file -> words of the error: what starts N processes must never become N worlds of one
REFUSED = {
    "pytorchjob-nproc": "PET_NPROC_PER_NODE='2' asks for several.*`torchrun SCRIPT`",
    "pytorchjob-elastic": "PET_NNODES='1:3': torchrun gives the ranks of these pods",
    "trainjob-auto": "PET_NPROC_PER_NODE='auto' leaves.*numProcPerNode: 1",
    "jobset-torchrun": "WORLD_SIZE is not set, though RANK=",
    "volcano-without-pytorch": "VC_TASK_INDEX=.*pytorch plugin",
}
OTHERS = {"mpijob-launcher", "ray-train-setup"}


def environments(name):
    return json.loads((FOLDER / f"{name}.json").read_text())["environments"]


def test_every_file_is_tested_and_names_its_source():
    assert {path.stem for path in FOLDER.iterdir()} == WORLDS.keys() | REFUSED.keys() | OTHERS
    for path in FOLDER.iterdir():
        assert all(link.startswith("https://") for link in json.loads(path.read_text())["source"])


@pytest.mark.parametrize("name", WORLDS)
def test_every_pod_knows_its_rank_and_the_root(name):
    launcher, host, port = WORLDS[name]
    specs = [resolve(env) for env in environments(name)]
    assert [spec.rank for spec in specs] == [0, 1, 2, 3]
    assert {(spec.launcher, spec.world_size) for spec in specs} == {(launcher, 4)}
    assert {(spec.root.kind, spec.root.host) for spec in specs} == {("endpoint", host)}
    (ports,) = {spec.root.ports for spec in specs}
    assert ports == (port,) if port else len(ports) > 1
    # The root is where rank 0 is, and its name may appear late.
    assert {spec.root.here for spec in specs} == {None}
    assert all(spec.patient_dns for spec in specs)
    assert len({spec.job_id for spec in specs}) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_pods_without_a_whole_world_are_refused_with_advice(name):
    for env in environments(name):
        with pytest.raises(LaunchError, match=REFUSED[name]):
            resolve(env)
        # The way out that the messages name, for a script beside the job.
        assert resolve({**env, "COMMKIT_LAUNCHER": "none"}).world_size == 1


def test_python_in_a_pytorchjob_is_told_that_torchruns_variable_was_not_read():
    for env in environments("pytorchjob"):
        (doubt, *_) = resolve(env).doubts
        assert "PET_NPROC_PER_NODE=auto" in doubt and "only rank of its pod" in doubt


def test_two_groups_of_a_leaderworkerset_are_two_jobs_with_ports_of_their_own():
    env = environments("leaderworkerset")[1]
    one, two = resolve(env), resolve({**env, "LWS_LEADER_ADDRESS": "llm-1.llm.default"})
    assert one.job_id != two.job_id
    assert not set(one.root.ports) & set(two.root.ports)


def test_a_port_given_for_a_leaderworkerset_is_taken():
    env = environments("leaderworkerset")[1]
    assert resolve({**env, "MASTER_PORT": "29500"}).root.ports == (29500,)
    assert resolve({**env, "COMMKIT_PORT": "29501"}).root.ports == (29501,)


def test_a_volcano_job_of_one_pod_is_a_world_of_one():
    env = environments("volcano-without-pytorch")[0]
    env = {k: v for k, v in env.items() if not k.startswith("VC_WORKER")}
    assert resolve(env).world_size == 1


def test_ray_passes_rank_and_size_as_arguments_before_it_sets_variables():
    for rank, env in enumerate(environments("ray-train-setup")):
        spec = resolve(env, init_method="env://", rank=rank, world_size=4)
        assert (spec.rank, spec.world_size) == (rank, 4)
        assert (spec.root.host, spec.root.ports) == ("10.244.1.7", (41235,))


def test_the_launcher_pod_of_an_mpijob_is_no_rank_until_mpirun_makes_it_one():
    env = environments("mpijob-launcher")[0]
    assert (resolve(env).launcher, resolve(env).world_size) == ("none", 1)
    launch = Path(FOLDER).parent / "launch" / "openmpi.json"
    for rank in json.loads(launch.read_text())["environments"]:
        assert resolve({**env, **rank}).launcher == "openmpi"
