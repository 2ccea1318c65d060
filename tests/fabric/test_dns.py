"""A DNS that is silent, fails, learns late, lies, or knows more addresses than answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from nameserver import SERVFAIL, SILENCE, Nameserver

pytestmark = pytest.mark.fabric

NAME = "gpu-1.cluster"
DEAD = "10.77.0.99"


@pytest.fixture
def cluster(fabric, ranks):
    """cluster(count): hosts that find gpu-1.cluster by DNS only, and a job of one rank each."""
    with Nameserver(fabric, "10.77.0.254") as nameserver:

        def make(count=2, master=NAME, wait=1, **options):
            gpu = fabric.hosts(count)
            for host in gpu:
                host.resolv.write_text(f"nameserver 10.77.0.254\noptions timeout:{wait}\n")
            return gpu, ranks(dict.fromkeys(gpu, 1), master=master, **options)

        make.nameserver = nameserver
        yield make


def test_a_nameserver_that_does_not_answer_is_named_at_the_deadline(cluster):
    cluster.nameserver.names[NAME] = SILENCE
    _, job = cluster(seconds=3, wait=5)
    root, other = job.start(body="once").outcomes()
    assert (root.error, other.error) == ("JoinTimeout", "JoinTimeout")
    assert "missing: rank 1" in root.text
    assert f"the look-up of {NAME} has taken" in other.text and "resolv.conf" in other.text


@pytest.mark.parametrize(
    "first", [SILENCE, SERVFAIL, None], ids=["silence", "SERVFAIL", "NXDOMAIN"]
)
def test_a_name_that_resolves_at_last_is_found(cluster, first):
    cluster.nameserver.names[NAME] = first
    _, job = cluster()
    job.start(body="once")
    cluster.nameserver.wait_for(NAME, times=3)
    cluster.nameserver.names[NAME] = "10.77.0.1"
    assert {value["hosts"] for value in job.values()} == {2}


@pytest.mark.slow
def test_a_nameserver_that_is_down_for_longer_than_patience_lasts_is_asked_again(cluster):
    """One look-up takes longer than the 10 s for which a name is tried without good reason."""
    cluster.nameserver.names[NAME] = SILENCE
    _, job = cluster(wait=6)
    job.start(body="once", JOIN_SECONDS="40")
    time.sleep(11)
    cluster.nameserver.names[NAME] = "10.77.0.1"
    assert {value["hosts"] for value in job.values()} == {2}


def test_a_dead_nameserver_before_a_good_one_costs_time_only(cluster):
    cluster.nameserver.names[NAME] = "10.77.0.1"
    gpu, job = cluster()
    gpu[1].resolv.write_text("nameserver 10.77.0.253\nnameserver 10.77.0.254\noptions timeout:1\n")
    assert {value["hosts"] for value in job.start(body="once").values()} == {2}


def test_an_address_of_a_host_that_is_not_of_the_job_is_left_when_the_name_moves(cluster):
    """As after a pod was moved: the name still means the old place, where somebody else is."""
    cluster.nameserver.names[NAME] = "10.77.0.3"
    gpu, job = cluster(3)
    job.start(gpu[0], gpu[1], body="once")
    job.wait_for_log("listening on port 29500")
    cluster.nameserver.wait_for(NAME, times=6)
    cluster.nameserver.names[NAME] = "10.77.0.1"
    job.start(gpu[2], body="once")
    assert {value["hosts"] for value in job.values()} == {3}


def test_an_address_where_nobody_is_is_named_at_the_deadline(cluster):
    cluster.nameserver.names[NAME] = (DEAD, "10.77.0.3")
    gpu, job = cluster(3, seconds=5)
    outcomes = job.start(gpu[0], gpu[1], body="once").outcomes()
    assert [outcome.error for outcome in outcomes] == ["JoinTimeout"] * 2
    assert f"the root at {NAME}:29500 has not answered" in outcomes[1].text
    assert f"{DEAD}:29500" in outcomes[1].text and "10.77.0.3:29500" in outcomes[1].text


@pytest.mark.parametrize(
    "dead", [pytest.param(DEAD, marks=pytest.mark.slow), "fd00:77::99"], ids=["IPv4", "IPv6"]
)
def test_the_first_of_several_addresses_may_be_dead(cluster, dead):
    cluster.nameserver.names[NAME] = (dead, "10.77.0.1")
    gpu, job = cluster()
    for i, host in enumerate(gpu, 1):
        host.ip(f"addr add fd00:77::{i}/64 dev eth0 nodad")
    assert {value["hosts"] for value in job.start(body="once").values()} == {2}


def test_a_busy_root_with_several_addresses_is_not_dialled_again_and_again(cluster, fabric):
    cluster.nameserver.names[NAME] = ("10.77.0.1", "10.77.0.201", "10.77.0.202")
    gpu, job = cluster()
    gpu[0].ip("addr add 10.77.0.201/24 dev eth0", "addr add 10.77.0.202/24 dev eth0")
    job.start(gpu[0])
    job.wait_for_log("listening on port 29500")
    (agent,) = fabric.pids(gpu[0], "commkit-agent")
    os.kill(agent, signal.SIGSTOP)
    job.start(gpu[1])
    job.wait_for_log("of host gpu-2,")
    time.sleep(3)
    os.kill(agent, signal.SIGCONT)
    values = job.values()
    assert values[0]["agent"]["accepted_total"] == "1", job.logs()
    assert values[0]["agent"]["strangers"] == "0"


STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("0.0.0.0", 29400, is_master=True, wait_for_workers=False)
print("ready", flush=True)
sys.stdin.read()
"""


def test_torchrun_s_store_is_asked_at_each_of_its_addresses(cluster, fabric):
    """Nobody answers at the first, at the second a port that is not the store's is silent."""
    cluster.nameserver.names[NAME] = (DEAD, "10.77.0.3", "10.77.0.1")
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "j", "seconds": 40}
    gpu, job = cluster(3, MASTER_PORT="29400", TORCHELASTIC_RESTART_COUNT="0", **elastic)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    silent = "import socket, sys; s = socket.create_server(('', 29400)); sys.stdin.read()"
    store = fabric.popen(gpu[0].command(sys.executable, "-c", STORE), **pipes)
    fabric.popen(gpu[2].command(sys.executable, "-c", silent), **pipes)
    assert store.stdout.readline() == "ready\n"
    assert {value["hosts"] for value in job.start(body="once").values()} == {3}
