"""torch.distributed and the bench over several hosts: data flows, not only the join."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from nameserver import Nameserver
from ranks import environment

from commkit import records

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(120)]

TRAIN = """
import datetime, json, sys
import torch, torch.distributed as dist
from commkit import api
api.init_process_group("gloo", timeout=datetime.timedelta(seconds=15))
rank, world = dist.get_rank(), dist.get_world_size()
value = torch.tensor([2.0**rank])
dist.all_reduce(value)
group = dist.new_group([0, world - 1])
pair = torch.tensor([float(rank)])
if rank in (0, world - 1):
    dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
hosts = api.world().identity.hosts
api.destroy_process_group()
sys.stdout.write(json.dumps([value.item(), pair.item(), hosts]) + "\\n")
"""


def start_everywhere(fabric, gpu, tmp_path, *command, seconds=50, **env):
    """One process of `command` a host, as one world, with the variables of env://."""
    processes = []
    for rank, host in enumerate(gpu):
        mine = {"RANK": str(rank), "WORLD_SIZE": str(len(gpu)), "MASTER_ADDR": "gpu-1"}
        mine |= {"MASTER_PORT": "29500", "COMMKIT_LOG_DIR": str(tmp_path), **env}
        processes.append(
            fabric.popen(
                host.command(sys.executable, *command),
                env=environment(**mine),
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    results = []
    for process in processes:
        results.append(process.communicate(timeout=seconds))
        assert process.returncode == 0, results[-1][1]
    return results


def test_gloo_reduces_across_four_hosts(fabric, tmp_path):
    results = start_everywhere(fabric, fabric.hosts(4), tmp_path, "-c", TRAIN)
    assert [json.loads(out) for out, _ in results] == [
        [15.0, 3.0, 4],
        [15.0, 1.0, 4],
        [15.0, 2.0, 4],
        [15.0, 3.0, 4],
    ]


def test_gloo_reduces_across_hosts_whose_names_mean_127_0_1_1(fabric, tmp_path):
    gpu = fabric.hosts(2)
    for host in gpu:
        host.set_hosts(f"127.0.1.1 {host.name}", "10.77.0.1 gpu-1-data")
    command = ("-c", TRAIN)
    results = start_everywhere(
        fabric, gpu, tmp_path, *command, seconds=20, MASTER_ADDR="gpu-1-data"
    )
    assert [json.loads(out)[0] for out, _ in results] == [3.0, 3.0]


def test_the_bench_measures_two_hosts_and_does_not_call_them_loopback(fabric, tmp_path):
    flags = ("-b", "8", "-e", "64K", "-f", "64", "-n", "3", "--json", "out.jsonl")
    bench = ("-m", "commkit", "bench", "all_reduce", *flags)
    (out, _), (silent, _) = start_everywhere(fabric, fabric.hosts(2), tmp_path, *bench)
    assert silent == ""
    assert "2 ranks on 2 hosts" in out and "loopback" not in out
    found = list(records.read(tmp_path / "out.jsonl"))
    assert [record.bytes for record in found] == [8, 8, 512, 512, 32768, 32768]
    assert {(record.world_size, record.hosts, record.wrong) for record in found} == {(2, 2, 0)}


def test_ranks_with_torch_do_not_ask_the_dns_either(fabric, tmp_path):
    with Nameserver(fabric, "10.77.0.254") as nameserver:
        start_everywhere(fabric, fabric.hosts(2), tmp_path, "-c", TRAIN)
        assert nameserver.asked == []
