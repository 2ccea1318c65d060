"""The start-up report: who was slowest at what, and who is missing when ranks are lost or late."""

from __future__ import annotations

import datetime
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch_jobs

import commkit
from commkit import api, groups, patch, report

MINUTE = datetime.timedelta(seconds=60)
START = ["resolve", "join", "store", "process_group"]
# Longer than a busy machine lets two ranks drift apart.
EARLY = 1.5


def _sum(group):
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value.item()


def _collective(sign):
    if os.environ["RANK"] == "3":
        sign.touch()
    else:
        while not sign.exists():
            time.sleep(0.01)
        time.sleep(EARLY)  # rank 3 has to wait for the others
    commkit.init_process_group("gloo", timeout=MINUTE, layout="tp=2,pp=4")
    before = commkit.start_report()
    after = commkit.start_report(first_use=True)
    assert _sum(commkit.get_group("tp")) == 2
    commkit.destroy_process_group()
    return before, after


def test_every_phase_has_its_slowest_median_and_fastest_rank(tmp_path):
    results = torch_jobs.run(_collective, 8, tmp_path / "sign", hosts=2, log_dir=tmp_path)
    assert results[1:] == [(None, None)] * 7
    before, after = results[0]
    made = [name for name in before["phases"] if name.startswith("create/")]
    assert {"create/tp", "create/pp", "create/dp"} <= set(made)
    assert list(before["phases"]) == [*START, "digest", "groups", *made]
    # Those of one rank open nothing, and are not used.
    used = [name for name in after["phases"] if name.startswith("first_use/")]
    assert {"first_use/tp", "first_use/pp"} <= set(used) and "first_use/dp" not in used
    for found in (before, after):
        assert (found["world_size"], found["hosts"]) == (8, 2)
        assert (found["missing"], found["why"]) == ("", "")
        for phase in found["phases"].values():
            places = [phase[name] for name in ("fastest", "median", "slowest")]
            assert [each["seconds"] for each in places] == sorted(
                each["seconds"] for each in places
            )
            for each in places:
                assert 0 <= each["seconds"] < 60 and each["host"] == f"host-{each['rank'] // 4}"
    join = after["phases"]["join"]
    assert join["slowest"]["rank"] == 3 and join["slowest"]["seconds"] > EARLY / 2
    assert join["fastest"]["rank"] != 3 and join["ranks"] == 8
    assert join["median"]["seconds"] < join["slowest"]["seconds"]


def _patched(path):
    patch.install()
    dist.init_process_group("gloo", timeout=MINUTE)
    rank = dist.get_rank()
    # Only some ranks are in it.
    dist.new_group([0, 1, 2], group_desc="few")
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], group_desc="pair")
    assert _sum(pair) == 2
    dist.destroy_process_group(pair)
    del pair
    gc.collect()
    alive = [one.family for one in groups.timings()[1] if one.group() is not None]
    dist.destroy_process_group()
    return alive


def test_an_unchanged_script_leaves_its_report_in_the_file_that_is_named(tmp_path):
    path = tmp_path / "report.json"
    env = {"COMMKIT_REPORT": str(path)}
    alive = torch_jobs.run(_patched, 4, str(path), log_dir=tmp_path, env=env)
    found = json.loads(path.read_text())
    assert (found["missing"], found["why"], found["world_size"]) == ("", "", 4)
    assert [*found["phases"]] == [*START, "create/few", "create/pair"]
    assert found["phases"]["create/few"]["ranks"] == 3
    assert found["phases"]["create/pair"]["ranks"] == 4
    # What was destroyed is not kept for the report's sake.
    assert alive == [["few"], ["few"], ["few"], []]
    assert [*tmp_path.glob("report*")] == [path]


def _some_die(path):
    commkit.init_process_group("gloo", timeout=MINUTE, layout={"pairs": [[0, 1], [2, 3]]})
    dist.barrier()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    while not api.world().failures():
        time.sleep(0.05)
    began = time.monotonic()
    commkit.destroy_process_group()
    return time.monotonic() - began


def test_a_dead_rank_is_missing_and_the_others_are_reported(tmp_path):
    path = tmp_path / "report.json"
    with torch_jobs.Job(4, log_dir=tmp_path, env={"COMMKIT_REPORT": str(path)}) as job:
        for rank in range(4):
            job.start(rank, _some_die, str(path))
        outcomes = job.outcomes()
    assert outcomes[2].exit_code == -signal.SIGKILL
    assert all(not outcomes[rank].error for rank in (0, 1, 3))
    assert all(outcomes[rank].value < 30 for rank in (0, 1, 3))
    found = json.loads(path.read_text())
    assert found["missing"] == "2" and "rank 2 " in found["why"]
    assert found["phases"]["create/pairs"]["ranks"] == 3


def _some_without():
    report.PATIENCE = 1.0
    commkit.init_process_group("gloo", timeout=MINUTE)
    rank = dist.get_rank()
    commkit.destroy_process_group()
    return rank


def test_ranks_that_left_without_a_word_are_named_after_a_bounded_wait(tmp_path):
    path = tmp_path / "report.json"
    with torch_jobs.Job(4, hosts=2, log_dir=tmp_path) as job:
        for rank in range(4):
            job.start(rank, _some_without, env={"COMMKIT_REPORT": str(path) if rank != 1 else ""})
        outcomes = job.outcomes()
    assert [outcomes[rank].value for rank in range(4)] == [0, 1, 2, 3]
    found = json.loads(path.read_text())
    assert found["missing"] == "1" and "rank 1" in found["why"]
    assert found["phases"]["join"]["ranks"] == 3


EXITS = """
import commkit
commkit.init_process_group("gloo")
"""


def test_a_script_that_just_ends_is_reported_too(tmp_path):
    path = tmp_path / "report.json"
    job = torch_jobs.Job(2, log_dir=tmp_path, env={"COMMKIT_REPORT": str(path)})
    processes = [
        subprocess.Popen([sys.executable, "-c", EXITS], env={**os.environ, **job.environment(rank)})
        for rank in range(2)
    ]
    assert [process.wait(110) for process in processes] == [0, 0]
    found = json.loads(path.read_text())
    assert found["missing"] == "" and list(found["phases"]) == START


@pytest.mark.parametrize("where", ["no/such/directory/report.json", "."])
def test_a_path_that_cannot_be_written_is_refused_before_the_join(tmp_path, where):
    path = tmp_path / where
    env = {"COMMKIT_REPORT": str(path)}
    with torch_jobs.Job(1, log_dir=tmp_path, env=env) as job:
        job.start(0, _some_without)
        outcome = job.outcomes()[0]
    assert outcome.error == "LaunchError"
    assert outcome.text.startswith(f"COMMKIT_REPORT={os.path.abspath(path)!r}: ")
    assert "expected the path of a file" in outcome.text


def _stock():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("commkit").addHandler(handler)
    commkit.init_process_group("gloo", timeout=MINUTE, layout="tp=1")
    found = commkit.start_report(first_use=True)
    commkit.destroy_process_group()
    return found, lines


def test_stock_torch_has_no_report(tmp_path):
    path = tmp_path / "report.json"
    env = {"COMMKIT_DISABLE": "1", "COMMKIT_REPORT": str(path)}
    [(found, lines)] = torch_jobs.run(_stock, 1, log_dir=tmp_path, env=env)
    assert found is None and not path.exists()
    assert any("there is no report" in line for line in lines)


def _with_a_log_of_nccl(place):
    path = f"{place}/{os.getpid()}.log"
    os.environ["NCCL_DEBUG_FILE"] = f"{place}/%p.log"
    commkit.init_process_group("gloo", timeout=MINUTE, layout={"tp": [[0, 1]]})
    rank = dist.get_rank()
    line = "Init timings - ncclCommInitRankConfig: rank {} nranks {} total 0.37 "
    with open(path, "w") as log:
        for size in (3, 2) if rank < 2 else (3,):
            text = f"{line.format(rank, size)}(kernels 0.28, rest 0.09)"
            print(f"h:{os.getpid()}:7 [0] NCCL INFO {text}", file=log)
    whole = commkit.start_report()
    commkit.destroy_process_group()
    return whole


def test_what_nccl_says_of_its_communicators_is_in_the_report(tmp_path):
    phases = torch_jobs.run(_with_a_log_of_nccl, 3, tmp_path, log_dir=tmp_path)[0]["phases"]
    assert {name: phase["ranks"] for name, phase in phases.items() if name.startswith("nccl/")} == {
        **{f"nccl/default/{part}": 3 for part in ("total", "kernels", "rest")},
        **{f"nccl/tp/{part}": 2 for part in ("total", "kernels", "rest")},
    }
    assert phases["nccl/tp/kernels"]["median"]["seconds"] == 0.28
