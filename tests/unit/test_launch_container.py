"""Containers: visible GPUs, who shares a host, shared memory (tests/cases/container.json)."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

from commkit import launch
from commkit.container import SharedMemory, require_device, shared_memory, visible_devices
from commkit.errors import LaunchError
from commkit.launch import HostIdentity, host_identity, resolve
from commkit.settings import Settings

CASES = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).resolve().parent.parent / "cases" / "container.json").read_text()
    )
}
#: value -> what CUDA sees, in the case's order; None: an error
VISIBLE = {
    "0,1": ["0", "1"],
    "GPU-11112222-3333-4444-5555-666677778888": ["GPU-11112222-3333-4444-5555-666677778888"],
    "GPU-1111": ["GPU-1111"],
    "MIG-aaaabbbb-cccc-5ddd-8eee-ffff00001111": ["MIG-aaaabbbb-cccc-5ddd-8eee-ffff00001111"],
    "MIG-GPU-11112222-3333-4444-5555-666677778888/1/2": [
        "MIG-GPU-11112222-3333-4444-5555-666677778888/1/2"
    ],
    "2,1,-1,0": ["2", "1"],
    "0,0": None,
    "all": [],
    "0, 1": ["0", "1"],
    "10": ["10"],
}


def test_cont_01_every_reported_value_has_an_expectation():
    assert list(VISIBLE) == CASES["CONT-01"]["input"]["data"]


@pytest.mark.parametrize("value", VISIBLE)
def test_cont_01_visible_devices_are_tokens_never_numbers(value):
    env = {"CUDA_VISIBLE_DEVICES": value}
    if VISIBLE[value] is None:
        with pytest.raises(LaunchError, match=f"CUDA_VISIBLE_DEVICES='{value}'.*twice"):
            visible_devices(env)
    else:
        assert visible_devices(env) == VISIBLE[value]


def test_cont_01_indices_and_uuids_do_not_mix():
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "0,GPU-1111,1"}) == ["0"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "GPU-1111,0"}) == ["GPU-1111"]


def test_cont_01_no_value_stops_a_job_from_being_understood():
    for value in VISIBLE:
        assert resolve({"CUDA_VISIBLE_DEVICES": value}).world_size == 1


@pytest.mark.parametrize("row", range(3))
def test_cont_02_empty_hides_all_and_unset_hides_none(row):
    env = CASES["CONT-02"]["input"]["data"][row]
    expected = CASES["CONT-02"]["expected"]["value"][row]["gpus"]
    assert visible_devices(env) == (None if expected == "all" else [])


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("value", ["", "NoDevFiles", "-1"])
def test_cont_02_nccl_without_a_gpu_is_an_error_that_quotes_the_variable(backend, value):
    with pytest.raises(LaunchError) as caught:
        require_device(backend, {"CUDA_VISIBLE_DEVICES": value})
    assert f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU" in str(caught.value)


def test_cont_02_gloo_needs_no_gpu_and_unset_or_listed_gpus_suit_nccl():
    require_device("gloo", {"CUDA_VISIBLE_DEVICES": ""})
    require_device("nccl", {})
    require_device("nccl", {"CUDA_VISIBLE_DEVICES": "GPU-1111"})


def _identities():
    return [
        HostIdentity(row["boot_id"], f"net-{i}", row["mnt_ns"], row["hostname"])
        for i, row in enumerate(CASES["CONT-05"]["input"]["data"])
    ]


def test_cont_05_the_boot_id_tells_physical_hosts_apart_not_the_name():
    hosts: dict[str, list[int]] = {}
    for index, identity in enumerate(_identities()):
        hosts.setdefault(identity.machine, []).append(index)
    assert list(hosts.values()) == CASES["CONT-05"]["expected"]["value"]["physical_hosts"]


def test_cont_05_shared_memory_needs_the_same_host_and_the_same_container():
    first, second, third = _identities()
    assert first.shares_memory_with(first)
    assert not first.shares_memory_with(second)
    assert not first.shares_memory_with(third)
    # One agent for each network namespace: containers with their own networks are two "hosts".
    assert len({identity.key for identity in (first, second, third)}) == 3


def test_a_host_id_from_the_user_replaces_the_identity():
    first = host_identity(Settings(host_id="h1"))
    assert first.key == "h1"
    assert first.machine == host_identity(Settings()).machine


def test_this_hosts_identity_is_what_proc_says():
    host = host_identity(Settings())
    assert host.netns == os.readlink("/proc/self/ns/net")[5:-1]
    assert host.mntns == os.readlink("/proc/self/ns/mnt")[5:-1]
    assert host.key == f"{host.boot_id}/{host.netns}"
    assert host.hostname == os.uname().nodename


@pytest.mark.parametrize("module", ["launch", "launchers", "container", "endpoint", "settings"])
def test_cont_07_start_up_can_neither_run_a_program_nor_load_a_library(module):
    # No nvidia-smi that hangs, no NVML that is missing: nothing here could call either.
    path = Path(launch.__file__).parent / f"{module}.py"
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & {"subprocess", "ctypes", "torch", "pynvml", "multiprocessing"}


def test_cont_08_a_small_dev_shm_gets_the_remedy():
    data = CASES["CONT-08"]["input"]["data"]
    size, free = (data["/dev/shm"][k] * 1_000_000 for k in ("size_MB", "free_MB"))
    line = SharedMemory("/dev/shm", size, free).doubt(data["local_ranks"])
    assert "3 of 64 MB free" in line
    assert "--shm-size" in line
    assert "medium: Memory" in line


def test_cont_08_enough_shared_memory_or_a_lone_rank_is_no_doubt():
    assert SharedMemory("/dev/shm", 10**10, 10**10).doubt(8) == ""
    assert SharedMemory("/dev/shm", 64 * 10**6, 0).doubt(1) == ""


def test_cont_08_segments_that_nobody_has_mapped_are_listed_and_left_alone(tmp_path):
    shm, proc = tmp_path / "shm", tmp_path / "proc"
    (proc / "7").mkdir(parents=True)
    shm.mkdir()
    for name in ("nccl-dead", "nccl-live", "psm-other"):
        (shm / name).write_text("x")
    (proc / "7" / "maps").write_text(
        f"7f00-7f01 rw-s 00000000 00:1a 5 {shm}/nccl-live\n7f02-7f03\n"
    )
    found = shared_memory(str(shm), str(proc))
    assert found is not None
    assert found.leftover == (f"{shm}/nccl-dead",)
    assert sorted(os.listdir(shm)) == ["nccl-dead", "nccl-live", "psm-other"]
    assert found.leftover[0] in SharedMemory("x", 1, 0, found.leftover).doubt(8)


def test_the_real_shared_memory_is_measured():
    found = shared_memory("/dev/shm")
    assert found is not None
    assert 0 <= found.free <= found.size
    assert shared_memory("/no/such/place") is None
