"""Declarations that differ, members that do not come, ranks that die: who is named, and when."""

from __future__ import annotations

import datetime
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist
import torch_jobs
from learning import KNOWN_SECONDS, SLACK_SECONDS

import commkit
from commkit import creation, stragglers
from commkit.journal import Entry, _told

SOON = datetime.timedelta(seconds=40)
SHORT = datetime.timedelta(seconds=4)

connects_later = pytest.mark.skipif(
    creation.torch_version() < (2, 8), reason="gloo connects lazily from torch 2.8 on"
)


def _declares(per_rank, at_init):
    mine = per_rank[int(os.environ["RANK"])]
    try:
        commkit.init_process_group("gloo", timeout=SOON, layout=mine if at_init else None)
        if not at_init:
            commkit.new_groups(mine)
    except commkit.DigestMismatch as error:
        text = str(error)
    else:
        return "no error"
    made = len(dist.distributed_c10d._world.pg_map) - dist.is_initialized()
    if dist.is_initialized():
        # The world is unhurt: all of them may try again.
        commkit.new_groups("tp=2")
        commkit.destroy_process_group()
    return text, made


@pytest.mark.parametrize("at_init", [False, True])
def test_layouts_that_differ_are_an_error_on_every_rank_before_any_group_exists(tmp_path, at_init):
    same = {"tp": [[0, 1], [2, 3]]}
    declared = [same, same, {"tp": [[0, 1], [3, 2]]}, same]
    for text, made in torch_jobs.run(_declares, 4, declared, at_init, hosts=2, log_dir=tmp_path):
        assert text.startswith("rank 2 (host host-1) differs: it has 4 ranks; 'tp': 0-1;3-2;")
        assert "rank 0 and 2 more have 4 ranks; 'tp': 2x1 from 2x2;" in text
        assert made == 0


def test_back_ends_that_differ_are_a_difference_too(tmp_path):
    results = torch_jobs.run(_declares_backend, 2, log_dir=tmp_path)
    assert all("backend cpu:gloo" in text and "rank 1" in text for text in results)


def _declares_backend():
    commkit.init_process_group("gloo", timeout=SOON)
    kind = "cpu:gloo" if dist.get_rank() else "gloo"
    with pytest.raises(commkit.DigestMismatch) as caught:
        commkit.new_groups("tp=2", backend=kind)
    commkit.destroy_process_group()
    return str(caught.value)


def _creates_others(patched):
    if patched:
        commkit.patch()
        dist.init_process_group("gloo", timeout=SOON)
    else:
        commkit.init_process_group("gloo", timeout=SOON)
    rank = dist.get_rank()
    new_group = dist.new_group if patched else commkit.new_group
    ranks = {0: [0, 1], 1: [1, 2], 2: [0, 2]}[rank]
    with pytest.raises(RuntimeError) as caught:
        new_group(ranks, timeout=SHORT, group_desc=f"of {rank}" if patched else "mine")
    text = str(caught.value)
    # All have failed alike: the world is still there.
    dist.barrier()
    dist.destroy_process_group()
    return type(caught.value).__name__, text


@pytest.mark.parametrize("patched", [False, True])
def test_groups_that_others_do_not_create_end_at_the_deadline_and_say_what_those_created(
    tmp_path, patched
):
    results = torch_jobs.run(_creates_others, 3, patched, hosts=3, log_dir=tmp_path)
    created = {0: "[0-1]", 1: "[1-2]", 2: "[0,2]"}
    missing = {0: 1, 1: 2, 2: 0}
    for rank, (kind, text) in enumerate(results):
        other = missing[rank]
        assert kind == "JoinTimeout", text
        label = f"'of {other}' " if patched else "'mine' "
        assert f"rank {other} did not come (rank {other} created {label}{created[other]}" in text
        assert f"rank {rank}: group " in text and "before the deadline" in text


def test_groups_that_look_alike_are_told_apart():
    ours = Entry("ck:gloo:ab:1", "tp", (0, 1))
    assert _told("ck:gloo:ab:1", "'pp' [0,2]", ours) == "'pp' [0,2]"
    assert _told("ck:gloo:ab:0", "'tp' [0-1]", ours) == (
        "'tp' [0-1] number 1, where this is number 2"
    )
    assert _told("ck:nccl:cd:1", "'tp' [0-1]", ours) == (
        "'tp' [0-1] as ck:nccl:cd:1, where this is ck:gloo:ab:1"
    )


def _dies_before_its_group():
    commkit.init_process_group("gloo", timeout=SOON)
    if dist.get_rank() == 2:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(commkit.RankDied) as caught:
        commkit.new_group([0, 1, 2])
    return time.monotonic() - began, str(caught.value)


def test_a_member_that_dies_before_it_comes_is_named_at_once(tmp_path):
    with torch_jobs.Job(3, log_dir=tmp_path) as job:
        for rank in range(3):
            job.start(rank, _dies_before_its_group)
        outcomes = job.outcomes()
    for rank in (0, 1):
        assert not outcomes[rank].error, outcomes[rank].trace
        seconds, text = outcomes[rank].value
        assert seconds < 1 + KNOWN_SECONDS + SLACK_SECONDS
        assert text.startswith(f"rank {rank}: group [0-2] (gloo) was not created: rank 2 (pid ")


def _lazy_and_alone(patience):
    stragglers.PATIENCE = patience
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("commkit").addHandler(handler)
    commkit.patch()
    dist.init_process_group("gloo", timeout=SOON)
    if dist.get_rank() == 0:
        dist.new_group([0, 1], group_desc="tp")
        while not said:
            time.sleep(0.05)
        dist.distributed_c10d._get_default_store().set("said", "")
    else:
        dist.distributed_c10d._get_default_store().wait(["said"], SOON)
        dist.new_group([0, 1], group_desc="tp")
    dist.destroy_process_group()
    return said


@connects_later
def test_the_log_names_members_that_have_not_come_to_a_group_that_connects_later(tmp_path):
    lazy = {"TORCH_GLOO_LAZY_INIT": "1"}
    first, second = torch_jobs.run(_lazy_and_alone, 2, 0.3, env=lazy, log_dir=tmp_path)
    assert set(first) == {
        "rank 0: group 'tp' [0-1] is not complete: rank 1 did not come (rank 1 created no group)"
    }
    assert second == []


SCRIPT = """
    import datetime, os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
    rank = dist.get_rank()
    if rank == 0:
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2), group_desc="tp")
        dist.all_reduce(torch.ones(1), group=group)
    else:
        dist.new_group([1], group_desc="own")
        time.sleep(25)
"""


@connects_later
def test_a_script_that_fails_in_a_collective_ends_with_who_did_not_come(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    base = {
        **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(torch_jobs.free_port()),
        "WORLD_SIZE": "2",
        "TORCH_GLOO_LAZY_INIT": "1",
        "COMMKIT_LOG_DIR": str(tmp_path),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "commkit", "run", str(script)],
            env={**base, "RANK": str(rank)},
            stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, text = ranks[0].communicate(timeout=60)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert ranks[0].returncode == 1
    assert (
        "commkit: group 'tp' [0-1]: rank 1 did not come (rank 1 created 'own' [1])"
        in text.splitlines()
    )


def _uses_torch_after_its_failure():
    commkit.init_process_group("gloo", timeout=SOON)
    with pytest.raises(commkit.LayoutError):
        commkit.new_groups("tp=3")
    group = commkit.new_group([0, 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    commkit.destroy_process_group()
    return tensor.item()


def test_a_refused_layout_costs_nothing(tmp_path):
    assert torch_jobs.run(_uses_torch_after_its_failure, 2, log_dir=tmp_path) == [2.0] * 2
