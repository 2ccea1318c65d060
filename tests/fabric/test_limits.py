"""Limits of a host: descriptors, ports, the listener's queue, the log's disk, /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from test_many_hosts import overflows

pytestmark = pytest.mark.fabric

FLOOD = """
import resource, socket, sys
count, address = int(sys.argv[1]), sys.argv[2]
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, count + 100))
held = []
for _ in range(count):
    held.append(socket.socket())
    held[-1].setblocking(False)
    held[-1].connect_ex((address, 29500))
print("dialled", flush=True)
sys.stdin.read()
"""


def flood(fabric, host, count, address="10.77.0.1"):
    """`count` connections that say nothing, at once and until the process's stdin is closed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = host.command(sys.executable, "-c", FLOOD, count, address)
    process = fabric.popen(command, **pipes)
    assert process.stdout.readline() == "dialled\n"
    return process


def limited(*commands):
    """Runs the rank, and what it starts, below these shell commands."""
    return ("sh", "-c", " && ".join([*commands, 'exec "$@"']), "sh")


def one_error(job, **options):
    [outcome] = job.start(**options).outcomes()
    assert outcome.error and "\n" not in outcome.text
    return outcome


# --- The listener's queue --------------------------------------------------------------------


@pytest.mark.parametrize("abort", [0, 1], ids=["dropped", "reset"])
def test_two_thousand_dial_a_listener_with_room_for_128_and_the_job_starts(fabric, ranks, abort):
    """Without SYN cookies, which would hide it."""
    gpu = fabric.hosts(6)
    gpu[0].sysctl(core__somaxconn=128, ipv4__tcp_syncookies=0, ipv4__tcp_abort_on_overflow=abort)
    job = ranks(dict.fromkeys(gpu, 1), master="10.77.0.1", seconds=40)
    job.start(gpu[0])
    job.wait_for_log("listening on port 29500")
    flood(fabric, gpu[5], 2000)
    assert overflows(gpu[0]) > 0
    job.start(*gpu[1:])
    assert {value["hosts"] for value in job.values()} == {6}


def test_ranks_that_find_their_agent_s_queue_full_give_up_at_the_deadline(fabric, ranks):
    """connect() to a Unix socket whose queue is full would wait for as long as it takes."""
    gpu = fabric.hosts(1)
    gpu[0].sysctl(core__somaxconn=1)
    job = ranks({gpu[0]: 7}, master="10.77.0.1", seconds=3)
    job.start(ranks=[0])
    job.wait_for_log("listening on port 29500")
    (agent,) = fabric.pids(gpu[0], "commkit-agent")
    os.kill(agent, signal.SIGSTOP)
    began = time.monotonic()
    outcomes = job.start(ranks=range(1, 6)).outcomes()
    assert time.monotonic() - began < 20
    os.kill(agent, signal.SIGCONT)
    errors = [outcome.error for outcome in outcomes]
    assert set(errors) == {"JoinTimeout", "OverlayError"} and errors.count("OverlayError") >= 2
    assert any("cannot reach this host's agent" in outcome.text for outcome in outcomes)


# --- Descriptors -----------------------------------------------------------------------------


@pytest.mark.parametrize("files", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_strangers_do_not_take_an_agent_s_last_descriptor(fabric, ranks, files):
    gpu = fabric.hosts(4)
    job = ranks(dict.fromkeys(gpu, 1), master="10.77.0.1", seconds=40)
    job.start(gpu[0], under=limited(f"ulimit -n {files}"))
    job.wait_for_log("listening on port 29500")
    flood(fabric, gpu[3], 1000)
    job.start(*gpu[1:])
    assert {value["hosts"] for value in job.values()} == {4}


# --- Ports -----------------------------------------------------------------------------------


def test_a_hundred_ephemeral_ports_are_enough_for_a_host(fabric, ranks):
    gpu = fabric.hosts(4)
    for host in gpu:
        host.sysctl(ipv4__ip_local_port_range='"40000 40099"')
    ranks(dict.fromkeys(gpu, 2), master="10.77.0.1").meet()


def test_a_host_without_a_free_port_says_so_at_once(fabric, ranks):
    gpu = fabric.hosts(1)
    gpu[0].sysctl(ipv4__ip_local_port_range='"40000 40009"')
    taking = (
        "import socket, sys\n"
        "held = [socket.create_server((a, p), family=f) for p in range(40000, 40010)\n"
        "        for a, f in (('0.0.0.0', 2), ('::1', 10))]\n"
        "print('taken', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    held = fabric.popen(gpu[0].command(sys.executable, "-c", taking), **pipes)
    assert held.stdout.readline() == "taken\n"
    outcome = one_error(ranks(dict.fromkeys(gpu, 1), master="10.77.0.1"))
    assert outcome.error == "OverlayError"
    assert "cannot listen on loopback for the store: Address already in use" in outcome.text


# --- Disk, /proc -----------------------------------------------------------------------------


def test_a_full_disk_costs_the_log_and_not_the_job(fabric, ranks, tmp_path):
    gpu = fabric.hosts(2)
    full = tmp_path / "full"
    full.mkdir()
    mount = f"mount -t tmpfs -o size=8k,mode=700 none {full}"
    fill = f"(cat /dev/zero > {full}/filler 2>/dev/null || true)"
    job = ranks(
        dict.fromkeys(gpu, 2), master="10.77.0.1", under=limited(mount, fill),
        COMMKIT_LOG_DIR=str(full), TMPDIR=str(full),
    )  # fmt: skip
    outcomes = job.start(body="once").outcomes()
    assert [outcome.error for outcome in outcomes] == [""] * 4
    notices = " ".join(notice for outcome in outcomes for notice in outcome.notices)
    assert "writes no log" in notices and "No space left on device" in notices


def test_a_log_that_may_not_grow_does_not_end_the_agent(fabric, ranks):
    gpu = fabric.hosts(2)
    job = ranks(dict.fromkeys(gpu, 1), master="10.77.0.1", under=limited("ulimit -f 0"))
    assert {value["hosts"] for value in job.start(body="once").values()} == {2}


def test_hosts_without_proc_are_told_apart_by_their_names(fabric, ranks):
    gpu = fabric.hosts(2)
    job = ranks(dict.fromkeys(gpu, 2), master="10.77.0.1", under=limited("umount -l /proc"))
    assert {value["hosts"] for value in job.start(body="once").values()} == {2}
