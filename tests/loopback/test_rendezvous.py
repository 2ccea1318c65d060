"""torch's own stores at MASTER_ADDR and MASTER_PORT, where the root's agent listens."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch_jobs

import commkit
from commkit import api

LIMIT = timedelta(seconds=40)


def _rendezvous(url="env://", **options):
    store, _, _ = next(importlib.import_module("torch.distributed.rendezvous").rendezvous(url))
    store.set_timeout(options.get("timeout", LIMIT))
    return store


def _port_of_root():
    (port,) = api.world().spec.root.ports
    return port


def _calls_remotely(rank):
    commkit.init_process_group("gloo")
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=40)
    answers = []
    for _ in range(2):
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
        answers.append(rpc.rpc_sync(f"worker{(rank + 1) % 3}", torch.add, (torch.ones(1), rank)))
        total = torch.ones(1)
        dist.all_reduce(total)
        answers.append(total)
        if len(answers) == 4:
            # As on stock torch, RPC goes on without the group that was started first.
            commkit.destroy_process_group()
            assert api.world() is None
            answers.append(rpc.rpc_sync(f"worker{(rank + 2) % 3}", os.getpid) != os.getpid())
        rpc.shutdown()
    return [float(answer) for answer in answers]


def test_rpc_at_the_port_of_the_root_works_beside_the_default_group_and_outlives_it(tmp_path):
    with torch_jobs.Job(3, log_dir=tmp_path) as job:
        for rank in range(3):
            job.start(rank, _calls_remotely, rank)
        outcomes = job.outcomes()
    for rank in range(3):
        assert outcomes[rank].value == [1 + rank, 3, 1 + rank, 3, 1], outcomes[rank].trace


def _asks_in_two_worlds(rank):
    found = []
    for world in range(2):
        commkit.init_process_group("gloo")
        first = _rendezvous()
        second = _rendezvous(f"tcp://127.0.0.1:{_port_of_root()}?rank={rank}&world_size=2")
        found.append(first.check(["mine"]))  # of the world before
        dist.barrier()
        if rank == 0:
            first.set("mine", f"world {world}")
        found.append(second.get("mine").decode())
        found.append(first.port != _port_of_root() and first.port == second.port)
        dist.barrier()
        del first, second
        commkit.destroy_process_group()
    return found


def test_all_who_ask_for_that_endpoint_in_one_world_share_one_server(tmp_path):
    with torch_jobs.Job(2, log_dir=tmp_path) as job:
        for rank in range(2):
            job.start(rank, _asks_in_two_worlds, rank)
        outcomes = job.outcomes()
    expected = [False, "world 0", True, False, "world 1", True]
    assert [outcomes[rank].value for rank in range(2)] == [expected] * 2, outcomes


def _asks_elsewhere(rank, port):
    commkit.init_process_group("gloo")
    store = _rendezvous(f"tcp://127.0.0.1:{port}?rank={rank}&world_size=2")
    found = store.port
    dist.barrier()
    commkit.destroy_process_group()
    return found


def test_a_store_at_another_port_is_where_it_was_asked_for(tmp_path):
    port = torch_jobs.free_port()
    with torch_jobs.Job(2, log_dir=tmp_path) as job:
        for rank in range(2):
            job.start(rank, _asks_elsewhere, rank, port)
        outcomes = job.outcomes()
    assert [outcomes[rank].value for rank in range(2)] == [port] * 2, outcomes


def _waits_alone():
    commkit.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        if rank == 1:
            create = importlib.import_module("torch.distributed.rendezvous")._create_c10d_store
            create("127.0.0.1", _port_of_root(), 1, 2, timedelta(seconds=1))
    except commkit.JoinTimeout as error:
        return str(error)
    finally:
        dist.barrier()
        commkit.destroy_process_group()


def test_whoever_waits_for_a_server_that_nobody_makes_is_told_who_should(tmp_path):
    alone = torch_jobs.run(_waits_alone, 2, log_dir=tmp_path)[1]
    assert alone.startswith("rank 1: rank 0 of 2 made no store for 127.0.0.1:"), alone
    assert "within 1 s" in alone
