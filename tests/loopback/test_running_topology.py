"""What the hosts of a running job are, gathered over the agent tree."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch_jobs

import commkit
from commkit.errors import EXIT_USAGE
from commkit.topology import read_text
from commkit.topology.readers import node

pytestmark = pytest.mark.timeout(120)

NETWORK = """
SwitchName=leaf0 Nodes=host-[0,2]
SwitchName=leaf1 Nodes=host-[1,9]
SwitchName=spine Switches=leaf[0-1]
"""


def _gathers(names):
    if names is not None:
        os.environ["COMMKIT_HOST_NAME"] = names
    commkit.init_process_group("gloo")
    alone = commkit.running_topology()
    with_network = commkit.running_topology(read_text(NETWORK))
    commkit.destroy_process_group()
    return alone, with_network


def test_rank_0_gets_every_host_once_with_its_ranks_and_its_place(tmp_path):
    found = torch_jobs.run(_gathers, 6, None, hosts=3, log_dir=tmp_path)
    assert found[1:] == [(None, None)] * 5
    alone, placed = found[0]
    for job in (alone, placed):
        assert [host.name for host in job.fabric.hosts] == ["host-0", "host-1", "host-2"]
        assert job.ranks == ((0, 1), (2, 3), (4, 5))
        assert job.devices == (None,) * 6
        mine = node.read().hosts[0]
        for host in job.fabric.hosts:
            assert host.devices == mine.devices and host.paths == mine.paths
            assert [nic for nic in host.nics if nic.name] == list(mine.nics)
    assert alone.fabric.switches == () and alone.fabric.notes == node.read().notes
    assert placed.fabric.distance(0, 2) == 0 and placed.fabric.distance(0, 1) == 1


def test_hosts_of_one_name_are_told_apart(tmp_path):
    found = torch_jobs.run(_gathers, 3, "same", hosts=3, log_dir=tmp_path)
    job, placed = found[0]
    assert [host.name for host in job.fabric.hosts] == ["same#1", "same#2", "same#3"]
    assert "3 hosts are called same: COMMKIT_HOST_NAME tells them apart" in job.fabric.notes
    assert placed.fabric.unplaced == (0, 1, 2)


@pytest.fixture
def job(tmp_path, repository):
    """Runs `commkit ARGS` as two ranks of two hosts; (exit code, output, errors) of each."""

    def call(*arguments):
        port = torch_jobs.free_port()
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "commkit", *arguments],
                cwd=tmp_path,
                env={
                    **os.environ,
                    "PYTHONPATH": str(repository),
                    "COMMKIT_LOG_DIR": str(tmp_path),
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "COMMKIT_HOST_ID": f"host-{rank}",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        try:
            texts = [process.communicate(timeout=60) for process in started]
        finally:
            for process in started:
                process.kill()
        return [(p.returncode, *text) for p, text in zip(started, texts, strict=True)]

    return call


def test_topo_show_running_answers_at_rank_0(tmp_path, job):
    (tmp_path / "topology.conf").write_text(NETWORK)
    first, second = job("topo", "show", "topology.conf", "--running")
    assert (first[0], first[2]) == (0, "") and second == (0, "", "")
    assert first[1].splitlines()[-2:] == ["ranks 0: host-0", "ranks 1: host-1"]
    assert "2 hosts" in first[1] and "leaf0" in first[1] and "host-9" not in first[1]


def test_topo_convert_running_writes_what_can_be_read_again(job):
    first, second = job("topo", "convert", "--running", "--to", "toml")
    assert (first[0], second) == (0, (0, "", "")), first
    fabric = read_text(first[1])
    assert [host.name for host in fabric.hosts] == ["host-0", "host-1"]
    assert fabric.hosts[0].devices == node.read().hosts[0].devices


def test_nobody_waits_for_a_rank_0_that_cannot_read_its_file(tmp_path, job):
    (tmp_path / "topology.conf").write_text("SwitchName=a Nodes=n[1-\n")
    first, _ = job("topo", "show", "topology.conf", "--running")
    assert first[0] == EXIT_USAGE and first[2].startswith("commkit: topology.conf:1:")
