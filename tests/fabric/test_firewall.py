"""Hosts behind a firewall that lets one port through: which ports a job needs, and no others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from test_launchers import WORKER, results, start
from test_torch_hosts import TRAIN, start_everywhere

pytestmark = [
    pytest.mark.fabric,
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft (Debian: nftables)"),
]

PORT = 31000

# Without connection tracking: a packet goes to an open port or comes from one.
RULES = """
table inet commkit {{
  counter refused {{ }}
  chain between {{
    iif lo accept
    oif lo accept
    tcp dport {{ {ports} }} accept
    tcp sport {{ {ports} }} accept
    meta l4proto {{ tcp, udp }} counter name refused drop
  }}
  chain input {{ type filter hook input priority 0; jump between; }}
  chain output {{ type filter hook output priority 0; jump between; }}
}}
"""


def _nft(host, *arguments, **options):
    done = subprocess.run(
        ["ip", "netns", "exec", host.namespace, "nft", *arguments],
        capture_output=True,
        text=True,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def only(hosts, *ports):
    for host in hosts:
        _nft(host, "-f", "-", input=RULES.format(ports=", ".join(map(str, ports))))


def refused(host):
    """Packets that the firewall of this host has dropped."""
    listed = json.loads(_nft(host, "-j", "list", "counters"))["nftables"]
    [packets] = [entry["counter"]["packets"] for entry in listed if "counter" in entry]
    return packets


def test_one_port_is_all_that_the_agents_of_a_job_need(fabric, ranks):
    gpu = fabric.hosts(4)
    only(gpu, PORT)
    # A chain: agents connect to agents that are not the root, and keys take several hops.
    job = ranks(
        dict.fromkeys(gpu, 2),
        master="10.77.0.1",
        COMMKIT_ONE_PORT=str(PORT),
        COMMKIT_TREE_DEGREE="1",
    )
    agents = job.meet()
    ports = sorted(agent["open_ports"] for agent in agents.values())
    assert ports == [[], [PORT], [PORT], [PORT]]  # the end of the chain has no children
    assert sorted(agent["children"] for agent in agents.values()) == ["0", "1", "1", "1"]
    assert [refused(host) for host in gpu] == [0] * 4
    # The firewall is one: another port is not reached, and it counts.
    probe = "import socket; socket.create_connection(('10.77.0.1', 31001), 0.5)"
    done = subprocess.run(gpu[1].command(sys.executable, "-c", probe), capture_output=True)
    assert done.returncode != 0 and refused(gpu[1]) > 0


def test_torchrun_s_store_needs_its_own_port_beside_the_agents(fabric, tmp_path):
    gpu = fabric.hosts(2)
    only(gpu, PORT, 29400)
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    processes = []
    for node, host in enumerate(gpu):
        flags = ["--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}"]
        flags += ["--master-addr=gpu-1", "--master-port=29400"]
        command = (sys.executable, "-m", "torch.distributed.run", *flags, worker)
        processes.append(start(fabric, host, tmp_path, *command, COMMKIT_ONE_PORT=str(PORT)))
    found = results(*processes)
    assert [line["rank"] for line in found] == [0, 1, 2, 3]
    assert {(line["hosts"], line["root"]) for line in found} == {(2, "elastic")}
    assert [refused(host) for host in gpu] == [0, 0]


def test_gloo_s_ports_are_those_of_ip_local_port_range(fabric, tmp_path):
    gpu = fabric.hosts(2)
    for host in gpu:
        host.sysctl(ipv4__ip_local_port_range='"42000 42199"')
    only(gpu, PORT, "42000-42199")
    env = {"COMMKIT_ONE_PORT": str(PORT)}
    found = start_everywhere(fabric, gpu, tmp_path, "-c", TRAIN, **env)
    assert [json.loads(out)[0] for out, _ in found] == [3.0, 3.0]
    assert [refused(host) for host in gpu] == [0, 0]
