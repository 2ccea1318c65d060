"""An order of hosts applied to what a launcher says of one process: the rank, the root, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commkit import launch, reorder, settings
from commkit.errors import LaunchError, TopologyError, UsageError
from commkit.topology.emit import emit, permutation
from commkit.topology.fabric import Fabric

HOSTS = ["n0.cluster", "n1.cluster", "n2.cluster"]
HOST_OF = [2, 0, 1]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "perm.json"
    file.write_text(emit("perm", HOST_OF, HOSTS, 2))
    return str(file)


def environment(rank, host, **more):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "6",
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n0",
        "MASTER_PORT": "29500",
        "COMMKIT_HOST_NAME": host,
        **more,
    }


def applied(topology, env):
    chosen = settings.load(env)
    spec = launch.resolve(env, settings=chosen)
    return reorder.apply(spec, reorder.load(topology, chosen), None, chosen, 1.0)[0]


@pytest.mark.parametrize("shape", ["n1.cluster", "n1", "N1.cluster.example", "n1.cluster.example"])
def test_a_host_is_found_with_and_without_its_domain(path, shape):
    assert applied(path, environment(3, shape)).rank == 5


def test_the_name_decides_where_the_launcher_s_order_is_another(path):
    spec = applied(path, environment(0, "n2"))
    assert (spec.rank, spec.launcher_rank) == (0, 0)
    assert applied(path, environment(1, "n0")).rank == 3


def test_the_root_stays_on_the_host_of_the_launcher_s_rank_0(path):
    here = [applied(path, environment(rank, f"n{rank // 2}")).root.here for rank in range(6)]
    assert here == [True, True, False, False, False, False]


def test_slurm_s_own_name_of_a_node_comes_before_the_hostname(path):
    env = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "n[0-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
        "SLURMD_NODENAME": "n2",
    }
    spec = applied(path, env)
    assert (spec.rank, spec.local_rank, spec.root.host, spec.root.here) == (1, 1, "n0", False)


def test_without_a_local_rank_the_ranks_of_a_host_are_taken_to_be_in_a_row(path):
    env = environment(5, "n2", LOCAL_RANK="", LOCAL_WORLD_SIZE="")
    assert applied(path, env).rank == 1


def test_rewriting_the_environment_twice_changes_nothing_more(path, monkeypatch):
    env = environment(3, "n1", COMMKIT_TOPOLOGY=path, GROUP_RANK="1", ROLE_RANK="3",
                      ROLE_WORLD_SIZE="6")  # fmt: skip
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    once = dict(env)
    reorder.rewrite_environment(once, settings.load(once))
    changed = {name: value for name, value in once.items() if env.get(name) != value}
    assert changed == {
        "RANK": "5",
        "GROUP_RANK": "2",
        "ROLE_RANK": "5",
        "COMMKIT_PLACED": "3:5:29500",
    }
    for name, value in once.items():
        monkeypatch.setenv(name, value)
    again = dict(once)
    reorder.rewrite_environment(again, settings.load(again))
    assert again == once
    spec = applied(None, once)
    assert (spec.rank, spec.launcher_rank, spec.root.here) == (5, 3, False)
    # The ranks of a job that this script starts are another launcher's.
    inner = {**once, "MASTER_PORT": "29600"}
    for name, value in inner.items():
        monkeypatch.setenv(name, value)
    assert applied(None, inner).launcher_rank == 5


@pytest.mark.parametrize(
    "changed",
    [{"LOCAL_RANK": ""}, {"RANK": ""}, {"COMMKIT_TOPOLOGY": ""}, {"MASTER_ADDR": ""}],
    ids=lambda changed: next(iter(changed)),
)
def test_an_environment_that_does_not_say_enough_is_left_alone(path, changed):
    env = {**environment(3, "n1", COMMKIT_TOPOLOGY=path), **changed}
    before = dict(env)
    reorder.rewrite_environment(env, settings.load(env))
    assert env == before


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (environment(3, "n9"), r"this host is called n9, which is none of the file's 3: n0\.clu"),
        (environment(3, "n1", WORLD_SIZE="8"), "places 6 ranks on 3 hosts, but WORLD_SIZE=8"),
        (
            environment(3, "n1", LOCAL_WORLD_SIZE="3"),
            "places 2 ranks on each host, but LOCAL_WORLD_SIZE=3",
        ),
        (environment(3, "n1", LOCAL_RANK="0"), "rank 3 has the local rank 0 of 2: the launcher"),
    ],
)
def test_a_job_that_the_file_is_not_for_is_refused(path, env, message):
    with pytest.raises(LaunchError, match=message) as caught:
        applied(path, env)
    assert str(caught.value).count(f"topology={path}") == 1 and "\n" not in str(caught.value)


def test_a_fabric_needs_a_layout():
    with pytest.raises(UsageError, match=r"^topology=Fabric describes a fabric: .* a layout too"):
        applied(Fabric(), environment(3, "n1"))


def test_the_digest_of_a_file_is_that_of_its_meaning(path, tmp_path):
    other = tmp_path / "pretty.json"
    other.write_text(json.dumps(json.loads(Path(path).read_text()), indent=4))
    chosen = settings.load({})
    same = [reorder.load(where, chosen) for where in (path, other)]
    same.append(reorder.load(permutation(HOST_OF, HOSTS, 2), chosen))
    assert len({topology.digest for topology in same}) == 1
    assert reorder.load(permutation([0, 1, 2], HOSTS, 2), chosen).digest != same[0].digest


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, UsageError, "No such file or directory"),
        (b'{"format": "commkit-placement", "ver', UsageError, "not JSON: .*write it with commkit"),
        (b'{"format": "commkit-placement", "version": 2}', UsageError, "version 2: expected 1"),
        (b"\xff\xfe{\x00", TopologyError, "byte 0 is not UTF-8"),
    ],
)
def test_a_file_that_is_no_order_is_an_error_of_one_line(tmp_path, content, error, message):
    file = tmp_path / "perm.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(error, match=message) as caught:
        reorder.load(str(file), settings.load({}))
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("topology", [7, "", b"", ["perm.json"], True])
def test_what_is_neither_a_path_nor_a_fabric_is_refused(topology):
    with pytest.raises(UsageError, match=r"^topology=.*: expected the path of a placement"):
        reorder.load(topology, settings.load({}))
