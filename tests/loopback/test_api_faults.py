"""Every live rank of a world that does not form gets one error that names ranks and hosts."""

from __future__ import annotations

import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch_jobs

import commkit
from commkit import api, creation


def _init(seconds=40.0):
    commkit.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
    dist.destroy_process_group()


def _errors(outcomes, *kinds):
    for key, outcome in outcomes.items():
        assert outcome.error in kinds, f"{key}: {outcome}"
        assert "\n" not in outcome.text
    return [outcome.text for outcome in outcomes.values()]


@pytest.mark.parametrize("hosts", [1, 2])
def test_missing_ranks_are_named_as_ranges_at_the_deadline(tmp_path, hosts):
    with torch_jobs.Job(8, hosts=hosts, log_dir=tmp_path) as job:
        for rank in (0, 1, 4, 7):
            job.start(rank, _init, 4.0)
        texts = _errors(job.outcomes(), "JoinTimeout")
    for text in texts:
        assert "2-3, 5-6" in text or "2-3,5-6" in text, text


def test_a_duplicate_rank_is_named_to_all(tmp_path):
    with torch_jobs.Job(4, log_dir=tmp_path) as job:
        for rank in range(3):
            job.start(rank, _init)
        job.wait_for_ranks(3)
        job.start(2, _init, label="second")
        texts = _errors(job.outcomes(), "JoinError")
    assert all("rank 2" in text for text in texts), texts


def test_unequal_world_sizes_are_named_to_all(tmp_path):
    with torch_jobs.Job(4, log_dir=tmp_path) as job:
        for rank in range(3):
            job.start(rank, _init)
        job.wait_for_ranks(3)
        job.start(3, _init, env={"WORLD_SIZE": "5"})
        texts = _errors(job.outcomes(), "JoinError")
    assert all("4" in text and "5" in text for text in texts), texts


def _die_in_creation(victim):
    torch_init = api._torch_init

    def dying(*arguments, **named):
        if int(os.environ["RANK"]) == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch_init(*arguments, **named)

    api._torch_init = dying
    # Connecting at once makes every other rank wait for the victim's address.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    _init(600.0)


@pytest.mark.skipif(
    creation.torch_version() < (2, 8),
    reason="before torch 2.8 gloo may wait for a peer's connection, and nothing ends that wait",
)
def test_a_rank_killed_while_groups_are_created_is_named_at_once(tmp_path):
    with torch_jobs.Job(4, hosts=2, log_dir=tmp_path) as job:
        for rank in range(4):
            job.start(rank, _die_in_creation, 2)
        outcomes = job.outcomes()
    assert outcomes.pop(2).exit_code == -signal.SIGKILL
    for text in _errors(outcomes, "RankDied"):
        assert "rank 2" in text and "host-1" in text, text


def _fail_in_creation(victim):
    torch_init = api._torch_init

    def failing(*arguments, **named):
        if int(os.environ["RANK"]) == victim:
            raise RuntimeError("this device is broken\nsecond line")
        return torch_init(*arguments, **named)

    api._torch_init = failing
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    try:
        _init(600.0)
    finally:
        assert api.world() is None and not dist.is_initialized()


def test_a_rank_whose_group_fails_tells_the_others_why(tmp_path):
    with torch_jobs.Job(3, hosts=3, log_dir=tmp_path) as job:
        for rank in range(3):
            job.start(rank, _fail_in_creation, 1)
        outcomes = job.outcomes()
    broken = outcomes.pop(1)
    assert broken.error == "JoinError" and "torch says: this device is broken" in broken.text
    for text in _errors(outcomes, "RankDied"):
        assert "rank 1" in text, text


def test_a_rank_killed_while_joining_is_named_to_those_who_wait(tmp_path):
    with torch_jobs.Job(4, hosts=2, log_dir=tmp_path) as job:
        for rank in range(3):  # rank 3 never comes, so that the join is still open
            job.start(rank, _init)
        job.wait_for_ranks(3)
        while not any(agent.get("children") == "1" for agent in job.agents()):
            time.sleep(0.02)  # until its host has joined the root's
        job.processes[2].kill()
        outcomes = job.outcomes()
    assert outcomes.pop(2).exit_code == -signal.SIGKILL
    for text in _errors(outcomes, "JoinError", "RankDied"):
        assert "rank 2" in text, text


# --- Again and again in one process -----------------------------------------------------------


def _left_over():
    return (
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
    )


def _cycles(count):
    agents = set()
    counts = []
    for cycle in range(count):
        commkit.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
        store = dist.distributed_c10d._get_default_store()
        rank = dist.get_rank()
        # A key of the epoch before would be found here.
        assert not store.check([f"left/{rank}"])
        store.set(f"left/{rank}", str(cycle))
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == dist.get_world_size()
        agents.add(api.world().identity.epoch)
        del store
        dist.destroy_process_group()
        counts.append(_left_over())
    return counts, len(agents)


@pytest.mark.parametrize("store", ["wire", "python"])
def test_ten_cycles_leak_no_descriptor_thread_key_or_agent(tmp_path, store):
    env = {"COMMKIT_STORE": store}
    with torch_jobs.Job(4, hosts=2, log_dir=tmp_path, env=env) as job:
        for rank in range(4):
            job.start(rank, _cycles, 10)
        outcomes = job.outcomes()
        for outcome in outcomes.values():
            assert not outcome.error, outcome.trace
            counts, epochs = outcome.value
            assert epochs == 10
            # The first cycle may open what torch keeps for the life of the process.
            assert max(counts[2:]) <= counts[1], counts
        patience = time.monotonic() + 10
        while (left := job.agents()) and time.monotonic() < patience:
            time.sleep(0.05)
        assert not left


def _early_bound():
    from torch.distributed import destroy_process_group as bound_before_commkit

    commkit.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
    bound_before_commkit()
    return api.world() is None


def test_the_tree_is_left_whoever_destroys_the_group(tmp_path):
    assert torch_jobs.run(_early_bound, 2, log_dir=tmp_path) == [True, True]


def _exit_without_destroy():
    commkit.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def test_exit_without_destroy_is_normal(tmp_path):
    assert torch_jobs.run(_exit_without_destroy, 3, log_dir=tmp_path) == [3.0] * 3
