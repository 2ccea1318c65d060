"""What goes wrong goes wrong as on GPUs: work stays pending, watchdogs end it, deaths are seen."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import rig_ranks as ranks
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group, _get_default_store
from worlds import begun

STARTS = ["stock bound", "commkit bound"]
#: Without what torch writes before it ends a process.
QUIET = {
    "TORCH_CPP_LOG_LEVEL": "FATAL",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
}
#: Errors are raised where work is waited for; otherwise torch's watchdog ends the process.
RAISES = {**QUIET, "TORCH_NCCL_BLOCKING_WAIT": "1"}


def _meet():
    """One good collective, so that all communicators are there."""
    dist.all_reduce(torch.ones(1).cuda())
    torch.cuda.synchronize()


def _error_of(tensor):
    """What an all-reduce raises, and after how many seconds."""
    begin = time.monotonic()
    try:
        dist.all_reduce(tensor, async_op=True).wait()
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - begin
    return "no error", time.monotonic() - begin


def _missing(start):
    """Rank 1 never joins the second collective."""
    with begun(start, seconds=3):
        _meet()
        store = _get_default_store()
        if dist.get_rank() == 0:
            error = _error_of(torch.ones(1).cuda())
            store.set("rank 0 has given up", "1")
            os.environ["RESULT"] = error[0]
        else:
            store.wait(["rank 0 has given up"], timedelta(seconds=40))
        _abort_process_group()
    return os.environ.get("RESULT", "")


@pytest.mark.parametrize("start", STARTS)
def test_waiting_for_a_rank_that_does_not_come_ends_with_torchs_timeout(start):
    first, second = ranks.run_ranks(2, _missing, start, env=RAISES)
    assert "Watchdog caught collective operation timeout" in first.value
    assert "OpType=ALLREDUCE" in first.value
    assert first.calls["abort"] >= 1  # by the watchdog, too
    assert second.calls["abort"] >= 1


def _hangs():
    with begun("stock bound", seconds=2):
        _meet()
        if dist.get_rank() == 1:
            time.sleep(25)
            os._exit(0)
        dist.all_reduce(torch.ones(1).cuda())
        torch.cuda.synchronize()  # until the watchdog has aborted the communicator
        time.sleep(40)


def test_the_watchdog_ends_a_process_that_hangs():
    first, _ = ranks.run_ranks(2, _hangs, env=QUIET, check=False)
    assert (first.error, first.exit_code) == ("Died", -signal.SIGABRT)


def _aborted():
    with begun("stock bound"):
        _meet()
        store = _get_default_store()
        if dist.get_rank() == 1:
            store.wait(["rank 0 has aborted"], timedelta(seconds=40))
            _abort_process_group()
            return None
        work = dist.all_reduce(torch.ones(1).cuda(), async_op=True)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work.wait()  # the side stream waits for the collective
            event = torch.cuda.Event()
            event.record()
        time.sleep(0.3)
        pending = not event.query()
        _abort_process_group()
        event.synchronize()
        store.set("rank 0 has aborted", "1")
        return pending, ranks.calls()["abort"]


def test_abort_frees_the_streams_of_what_a_peer_never_joined():
    env = {**QUIET, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    first, _ = ranks.run_ranks(2, _aborted, env=env)
    assert first.value == (True, 1)


def _death(start):
    with begun(start, seconds=40):
        _meet()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        error = _error_of(torch.ones(1).cuda())
        _abort_process_group()
        return error


@pytest.mark.parametrize("start", STARTS)
def test_the_death_of_a_rank_is_an_error_at_the_others(start):
    results = ranks.run_ranks(4, _death, start, env=RAISES, check=False)
    assert results[1].exit_code == -signal.SIGKILL
    for rank in (0, 2, 3):
        text, seconds = results[rank].value
        assert "remote process exited" in text, results[rank]
        assert seconds < 35  # not by the timeout of 40 s


def _mismatch():
    with begun("stock bound"):
        _meet()
        error, _ = _error_of(torch.ones(4 + dist.get_rank()).cuda())
        _abort_process_group()
        return error


def test_ranks_that_disagree_about_a_collective_are_told():
    for result in ranks.run_ranks(2, _mismatch, env=RAISES):
        assert "invalid usage" in result.value
        assert "ranks disagree: rank 0 call" in result.value
        assert "count 4" in result.value and "count 5" in result.value
