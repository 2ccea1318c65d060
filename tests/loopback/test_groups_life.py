"""What groups leave behind, and what several threads may do with them."""

from __future__ import annotations

import datetime
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch_jobs

import commkit
from commkit import creation, groups, patch

SOON = datetime.timedelta(seconds=40)


@pytest.fixture(autouse=True)
def _undo():
    yield
    patch.uninstall()


def total(group, value):
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


def _open():
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _cycles():
    commkit.patch()
    dist.init_process_group("gloo", timeout=SOON)

    def cycle(number):
        # Deadlines of their own, as from those who count down.
        limit = SOON + datetime.timedelta(milliseconds=number)
        commkit.new_groups({f"family{number}": [[0, 1]]}, timeout=limit)
        made = [
            commkit.get_group(f"family{number}"),
            commkit.new_group([0, 1], limit),
            dist.new_group([0, 1], limit),
            dist.new_group([dist.get_rank()], limit, use_local_synchronization=True),
        ]
        sums = [total(group, 1) for group in made]
        for group in made:
            dist.destroy_process_group(group)
        return sums

    for number in range(25):
        assert cycle(number) == [2, 2, 2, 1]
    before = _open()
    for number in range(25, 50):
        cycle(number)
    after = _open()
    dist.destroy_process_group()
    return before, after


@pytest.mark.skipif(
    creation.torch_version() < (2, 8), reason="torch 2.6 hangs where gloo's groups are destroyed"
)
def test_groups_that_were_destroyed_leave_no_descriptor_and_no_thread(tmp_path):
    for before, after in torch_jobs.run(_cycles, 2, log_dir=tmp_path):
        assert after == before


def _from_threads(patched):
    if patched:
        commkit.patch()
        dist.init_process_group("gloo", timeout=SOON)
    else:
        commkit.init_process_group("gloo", timeout=SOON)
    rank = dist.get_rank()
    kinds = ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"]  # a name of its own each
    sums = {}

    def create(place):
        if patched:
            group = dist.new_group([0, 1], SOON, kinds[place])
        else:
            group = commkit.new_group([0, 1], SOON, group_desc=kinds[place])
        sums[place] = total(group, 10**place)

    threads = [threading.Thread(target=create, args=(place,)) for place in range(3)]
    # In opposite orders: what one rank begins first the other begins last.
    for thread in threads if rank == 0 else threads[::-1]:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    dist.destroy_process_group()
    return sums


@pytest.mark.parametrize("patched", [False, True])
def test_threads_create_groups_in_orders_of_their_own(tmp_path, patched):
    for sums in torch_jobs.run(_from_threads, 2, patched, log_dir=tmp_path):
        assert sums == {0: 2, 1: 20, 2: 200}


def _forks():
    commkit.init_process_group("gloo", timeout=SOON)
    held, over = threading.Event(), threading.Event()

    def hold():
        locks = [groups._registry_lock, groups.joined().stragglers._changed]
        for lock in locks:
            lock.acquire()
        held.set()
        over.wait()
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        # No rank of the world; nobody releases here what the other thread has locked.
        free = groups._registry_lock.acquire(timeout=10)
        os._exit(0 if free and groups.joined() is None else 1)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    over.set()
    thread.join()
    result = total(commkit.new_group([0, 1]), 1)
    commkit.destroy_process_group()
    return ended[0] == child and ended[1] == 0, result


def test_a_child_forked_while_a_thread_creates_groups_is_free_of_its_parents_world(tmp_path):
    assert torch_jobs.run(_forks, 2, log_dir=tmp_path) == [(True, 2)] * 2
