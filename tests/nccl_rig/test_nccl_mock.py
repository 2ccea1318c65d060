"""The mock's own behaviour, called as a program written in C would call NCCL."""

from __future__ import annotations

import ctypes
import json
import os
import time
from datetime import timedelta

import pytest
import rig_ranks as ranks
import torch
import torch.distributed as dist

SUCCESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 0, 4, 5, 6, 7
NO_COLOR = -1
UNDEFINED = -(2**31)


class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("rest", ctypes.c_char * 128),
    ]


def _nccl():
    nccl = ctypes.CDLL(None)
    nccl.ncclGetLastError.restype = ctypes.c_char_p
    nccl.ncclGetLastError.argtypes = [ctypes.c_void_p]
    for name in ("Abort", "Destroy", "Finalize"):
        getattr(nccl, f"ncclComm{name}").argtypes = [ctypes.c_void_p]
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]
    nccl.ncclCommInitRankConfig.argtypes = [*nccl.ncclCommInitRank.argtypes, ctypes.c_void_p]
    nccl.ncclCommGetAsyncError.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    nccl.ncclCommSplit.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int] + [
        ctypes.c_void_p
    ] * 2
    return nccl


def _meeting():
    """NCCL, this rank, the size, and a store to give things to the others by."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks.device()
    store = dist.TCPStore(
        "127.0.0.1",
        int(os.environ["MASTER_PORT"]),
        size,
        rank == 0,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
    )
    return _nccl(), rank, size, store


def _shared_id(nccl, rank, store):
    if rank == 0:
        made = Id()
        assert nccl.ncclGetUniqueId(ctypes.byref(made)) == SUCCESS
        store.set("id", ctypes.string_at(ctypes.byref(made), 128))
    return Id.from_buffer_copy(store.get("id"))


def _init(nccl, size, unique, rank):
    comm = ctypes.c_void_p()
    result = nccl.ncclCommInitRank(ctypes.byref(comm), size, unique, rank)
    return result, comm


def _state(nccl, comm):
    state = ctypes.c_int(-1)
    assert nccl.ncclCommGetAsyncError(comm, ctypes.byref(state)) == SUCCESS
    return state.value


def _until_ready(nccl, comm):
    deadline = time.monotonic() + 30
    while _state(nccl, comm) == IN_PROGRESS and time.monotonic() < deadline:
        time.sleep(0.005)
    return _state(nccl, comm)


def _meet(store, key, size):
    store.add(key, 1)
    while int(store.get(key)) < size:
        time.sleep(0.01)


def _leave(store, size):
    """The first rank keeps the store until all have come here."""
    _meet(store, "leaving", size)
    store.add("left", 1)
    while int(os.environ["RANK"]) == 0 and int(store.get("left")) < size:
        time.sleep(0.01)


def _wrong_init(sizes, places):
    nccl, rank, size, store = _meeting()
    unique = _shared_id(nccl, rank, store)
    result, comm = _init(nccl, sizes[rank], unique, places[rank])
    text = nccl.ncclGetLastError(comm).decode()
    # Whoever comes after the maker of the id has left is told that instead.
    _meet(store, "tried", size)
    nccl.ncclCommAbort(comm)
    _leave(store, size)
    return result, text


def test_ranks_that_disagree_about_the_size_are_all_refused():
    for result in ranks.run_ranks(3, _wrong_init, [3, 3, 4], [0, 1, 2]):
        code, text = result.value
        assert code == INVALID_USAGE
        assert "says that there are" in text


def test_two_processes_with_one_rank_are_all_refused():
    for result in ranks.run_ranks(3, _wrong_init, [3, 3, 3], [0, 1, 1]):
        assert result.value == (INVALID_USAGE, "rank 1 of 3 has come twice")


def _one_device():
    os.environ["NCCL_HOSTID"] = "the same"
    nccl, rank, size, store = _meeting()
    torch.cuda.set_device(0)
    unique = _shared_id(nccl, rank, store)
    result, comm = _init(nccl, size, unique, rank)
    text = nccl.ncclGetLastError(comm).decode()
    _leave(store, size)
    return result, text


def test_two_ranks_of_one_host_cannot_share_a_device():
    for result in ranks.run_ranks(2, _one_device):
        assert result.value[0] == INVALID_USAGE
        assert "Duplicate GPU detected" in result.value[1]


def _outside():
    nccl, *_ = _meeting()
    made = Id()
    nccl.ncclGetUniqueId(ctypes.byref(made))
    outside = _init(nccl, 2, made, 2)[0]
    foreign = _init(nccl, 1, Id(), 0)[0]
    return outside, foreign


def test_a_rank_outside_the_world_and_a_foreign_id_are_invalid_arguments():
    (result,) = ranks.run_ranks(1, _outside)
    assert result.value == (INVALID_ARGUMENT, INVALID_ARGUMENT)


def _pending():
    """Rank 1 joins only after rank 0 has seen that it is waited for."""
    nccl, rank, size, store = _meeting()
    unique = _shared_id(nccl, rank, store)
    if rank == 1:
        store.wait(["looked"])
        result, comm = _init(nccl, size, unique, rank)
        nccl.ncclCommDestroy(comm)
        _leave(store, size)
        return result
    comm = ctypes.c_void_p()
    config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 23007, 0)
    first = nccl.ncclCommInitRankConfig(
        ctypes.byref(comm), size, unique, rank, ctypes.byref(config)
    )
    time.sleep(0.3)
    waiting = _state(nccl, comm)
    tensor = torch.zeros(1).cuda()
    early = nccl.ncclAllReduce(
        *(ctypes.c_void_p(tensor.data_ptr()),) * 2, ctypes.c_size_t(1), 7, 0, comm, None
    )
    store.set("looked", "1")
    ready = _until_ready(nccl, comm)
    nccl.ncclCommDestroy(comm)
    _leave(store, size)
    return first, waiting, early, ready


def test_a_call_that_does_not_block_is_in_progress_until_all_ranks_have_come():
    first, second = ranks.run_ranks(2, _pending)
    assert first.value == (IN_PROGRESS, IN_PROGRESS, INVALID_ARGUMENT, SUCCESS)
    assert second.value == SUCCESS


def _given_up():
    """Nobody else comes; abort ends the wait."""
    nccl, rank, _, store = _meeting()
    unique = _shared_id(nccl, rank, store)
    comm = ctypes.c_void_p()
    config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 23007, 0)
    nccl.ncclCommInitRankConfig(ctypes.byref(comm), 2, unique, 0, ctypes.byref(config))
    waiting = _state(nccl, comm)
    return waiting, nccl.ncclCommAbort(comm)


def test_abort_ends_the_wait_for_the_others():
    (result,) = ranks.run_ranks(1, _given_up)
    assert result.value == (IN_PROGRESS, SUCCESS)


def _late_split():
    nccl, rank, size, store = _meeting()
    _, parent = _init(nccl, size, _shared_id(nccl, rank, store), rank)
    if rank == size - 1:
        time.sleep(0.5)
        store.set("the last one comes", "1")
    child = ctypes.c_void_p()
    color = NO_COLOR if rank == 1 else 0
    # Keys turn the order round.
    result = nccl.ncclCommSplit(parent, color, size - rank, ctypes.byref(child), None)
    waited = store.check(["the last one comes"])
    place = ctypes.c_int(-1)
    if child:
        nccl.ncclCommUserRank(child, ctypes.byref(place))
        nccl.ncclCommDestroy(child)
    nccl.ncclCommDestroy(parent)
    _leave(store, size)
    return result, waited, bool(child), place.value


def test_a_split_waits_for_every_rank_of_the_parent():
    values = [result.value for result in ranks.run_ranks(4, _late_split)]
    assert [value[:2] for value in values] == [(SUCCESS, True)] * 4
    assert [value[2:] for value in values] == [(True, 2), (False, -1), (True, 1), (True, 0)]


def _costs():
    nccl, rank, size, store = _meeting()
    begin = time.monotonic()
    _, parent = _init(nccl, size, _shared_id(nccl, rank, store), rank)
    made = time.monotonic() - begin
    child = ctypes.c_void_p()
    begin = time.monotonic()
    nccl.ncclCommSplit(parent, 0, rank, ctypes.byref(child), None)
    split = time.monotonic() - begin
    _leave(store, size)
    return made, split


def test_creation_and_split_can_be_made_to_take_longer():
    env = {"NCCL_RIG_INIT_MS": "300", "NCCL_RIG_SPLIT_MS": "600"}
    for result in ranks.run_ranks(2, _costs, env=env):
        assert result.value[0] >= 0.3
        assert result.value[1] >= 0.6


def _ends(how):
    nccl, rank, size, store = _meeting()
    _, comm = _init(nccl, size, _shared_id(nccl, rank, store), rank)
    nccl.ncclCommFinalize(comm)
    nccl.ncclCommDestroy(comm)
    _leave(store, size)
    if how == "exit":
        os._exit(0)
    return os.getpid()


@pytest.mark.parametrize("how", ["exit", "return"])
def test_counters_are_left_in_a_file_however_the_process_ends(how, tmp_path):
    ranks.run_ranks(2, _ends, how, log_dir=tmp_path, check=False)
    files = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert len(files) == 2
    assert sorted(file["get_unique_id"] for file in files) == [0, 1]
    for file in files:
        assert (file["init_rank"], file["created"], file["finalize"], file["destroy"]) == (1,) * 4


SCRIPT = """
import os, sys, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
tensor = torch.ones(1).cuda()
dist.all_reduce(tensor)
print("sum", tensor.item(), sys.argv[1])
dist.destroy_process_group()
"""


def test_a_script_runs_in_every_rank(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for result in ranks.run_ranks(2, script, "argument", log_dir=tmp_path):
        assert result.exit_code == 0
        assert "sum 2.0 argument" in result.value
        assert (result.calls["created"], result.calls["all_reduce"]) == (1, 1)
