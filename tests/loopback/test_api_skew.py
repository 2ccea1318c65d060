"""Ranks that come late to a step of an init, stand still, or are gone at its end."""

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
from commkit import api, errors, overlay

#: Seconds by which rank 1 or rank 2 is late at each point.
SKEW = 1.0


def _at(point, hook):
    """Calls `hook` before the step of init_process_group that begins at this point."""
    if point == "join":
        module, name = overlay, "join"
    else:
        module, name = api, {"store": "open_store", "process group": "_torch_init"}[point]
    plain = getattr(module, name)

    def hooked(*arguments, **named):
        hook()
        return plain(*arguments, **named)

    setattr(module, name, hooked)


def _skewed(point, late, lazy):
    rank = int(os.environ["RANK"])
    os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
    if rank in late and point != "first collective":
        _at(point, lambda: time.sleep(SKEW))
    commkit.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
    if rank in late and point == "first collective":
        time.sleep(SKEW)
    value = torch.ones(1)
    dist.all_reduce(value)
    # Those who are early leave as soon as they may.
    commkit.destroy_process_group()
    return value.item()


@pytest.mark.parametrize(
    ("point", "lazy"),
    [
        ("join", "1"),
        ("store", "0"),
        ("process group", "0"),
        ("process group", "1"),
        ("first collective", "0"),
        ("first collective", "1"),
    ],
)
def test_an_init_completes_whatever_point_a_rank_comes_late_to(tmp_path, point, lazy):
    late = {"join": (0,), "store": (1, 2)}.get(point, (2,))
    values = torch_jobs.run(_skewed, 4, point, late, lazy, hosts=2, log_dir=tmp_path)
    assert values == [4.0] * 4


def _again_with_one_that_stands_still():
    rank = int(os.environ["RANK"])
    commkit.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
    commkit.destroy_process_group()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        commkit.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
    except errors.JoinTimeout as error:
        return str(error)
    return "joined"


def test_a_rank_that_stands_still_before_the_second_init_is_named_at_its_deadline(tmp_path):
    with torch_jobs.Job(3, hosts=3, log_dir=tmp_path) as job:
        for rank in range(3):
            job.start(rank, _again_with_one_that_stands_still)
        for rank in (0, 2):
            job.processes[rank].join(45)
        job.processes[1].kill()
        outcomes = job.outcomes()
    for rank in (0, 2):
        assert not outcomes[rank].error, outcomes[rank].trace
        assert "missing: rank 1" in outcomes[rank].value


def _raises_after_init():
    commkit.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
    dist.barrier()  # else the others may still be connecting to it
    if os.environ["RANK"] == "1":
        raise ValueError("the loss is not a number")
    time.sleep(0.5)
    began = time.monotonic()
    commkit.destroy_process_group()
    return time.monotonic() - began


def test_destroy_does_not_wait_for_a_rank_that_has_ended_with_an_exception(tmp_path):
    with torch_jobs.Job(3, log_dir=tmp_path) as job:
        for rank in range(3):
            job.start(rank, _raises_after_init)
        outcomes = job.outcomes()
    assert outcomes[1].error == "ValueError"
    for rank in (0, 2):
        assert not outcomes[rank].error, outcomes[rank].trace
        assert outcomes[rank].value < 10  # a third of what it would wait for the living


def _in_the_third_epoch():
    """Its epoch, and that of the world in which a rank has been replaced by another process."""
    epochs = []
    for _ in range(3):
        commkit.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
        epochs.append(api.world().identity.epoch)
        if len(epochs) < 3:
            commkit.destroy_process_group()
    while not api.world().failures():
        time.sleep(0.02)
    commkit.destroy_process_group()
    commkit.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
    value = torch.ones(1)
    dist.all_reduce(value)
    epochs.append(api.world().identity.epoch)
    commkit.destroy_process_group()
    return epochs, value.item()


def _dies_in_the_third_epoch():
    for turn in range(3):
        commkit.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
        if turn < 2:
            commkit.destroy_process_group()
    os.kill(os.getpid(), signal.SIGKILL)


def _newcomer():
    commkit.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
    value = torch.ones(1)
    dist.all_reduce(value)
    epoch = api.world().identity.epoch
    commkit.destroy_process_group()
    return epoch, value.item()


def test_a_process_that_replaces_a_dead_rank_learns_the_epoch_of_the_others(tmp_path):
    with torch_jobs.Job(3, hosts=3, log_dir=tmp_path) as job:
        for rank in (0, 1):
            job.start(rank, _in_the_third_epoch)
        job.start(2, _dies_in_the_third_epoch)
        job.processes[2].join(45)
        job.start(2, _newcomer, label="newcomer")
        outcomes = job.outcomes()
    assert outcomes[2].exit_code == -signal.SIGKILL
    new, total = outcomes["newcomer"].value
    assert total == 3.0
    for rank in (0, 1):
        epochs, value = outcomes[rank].value
        assert value == 3.0 and epochs[3] == new and len(set(epochs)) == 4
