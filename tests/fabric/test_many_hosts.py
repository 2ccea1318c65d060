"""More hosts than the root's listener or its descriptors have room for at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

pytestmark = pytest.mark.fabric

HOSTS = 12
FILES = 20


def overflows(host):
    """How often this host's kernel had no room for a connection that was to be accepted."""
    pid = host.fabric.pids(host)[0]
    with open(f"/proc/{pid}/net/netstat") as table:
        names, values = (line.split() for line in table if line.startswith("TcpExt:"))
    return int(values[names.index("ListenOverflows")])


def connections(pid, port):
    """TCP connections that the kernel of this process's host has at a port, accepted or not."""
    lines = []
    for name in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{name}") as table:
            lines += [line.split() for line in list(table)[1:]]
    return sum(line[3] == "01" and line[1].endswith(f":{port:04X}") for line in lines)


@contextlib.contextmanager
def root_accepts_nobody(fabric, job, host, **options):
    """Starts the root, and lets it go on with the join at the end of the block."""
    job.start(host, **options)
    job.wait_for_log("listening on port 29500")
    (agent,) = fabric.pids(host, "commkit-agent")
    os.kill(agent, signal.SIGSTOP)
    try:
        yield agent
    finally:
        os.kill(agent, signal.SIGCONT)


def wait_until(condition, what):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize("abort", [0, 1], ids=["dropped", "reset"])
def test_hosts_that_find_the_root_s_listener_full_come_again(fabric, ranks, abort):
    gpu = fabric.hosts(HOSTS)
    gpu[0].sysctl(core__somaxconn=1, ipv4__tcp_abort_on_overflow=abort)
    job = ranks(dict.fromkeys(gpu, 1), master="10.77.0.1", seconds=40, COMMKIT_TREE_DEGREE="4")
    with root_accepts_nobody(fabric, job, gpu[0]):
        job.start(*gpu[1:])
        wait_until(lambda: overflows(gpu[0]) >= HOSTS // 2, "the listener never overflowed")
    values = job.values()
    assert {value["hosts"] for value in values} == {HOSTS}
    assert values[0]["agent"]["children"] == "4"


def test_an_agent_raises_a_low_limit_of_open_files(fabric, ranks):
    gpu = fabric.hosts(HOSTS)
    limit = ("sh", "-c", 'ulimit -S -n 20 && exec "$@"', "sh")
    job = ranks(
        dict.fromkeys(gpu, 1), master="10.77.0.1", under=limit, COMMKIT_TREE_DEGREE=str(HOSTS)
    )
    agents = job.meet()
    assert agents["gpu-1"]["children"] == str(HOSTS - 1)
    assert job.logs().count("raised the limit of open files from 20 to ") == HOSTS


def test_a_root_without_descriptors_for_all_hosts_at_once_takes_them_one_after_another(
    fabric, ranks
):
    gpu = fabric.hosts(HOSTS)
    job = ranks(
        dict.fromkeys(gpu, 1),
        master="10.77.0.1",
        seconds=40,
        COMMKIT_TREE_DEGREE="3",
    )
    limit = ("sh", "-c", f'ulimit -n {FILES} && exec "$@"', "sh")
    with root_accepts_nobody(fabric, job, gpu[0], under=limit) as agent:
        job.start(*gpu[1:])
        wait_until(lambda: connections(agent, 29500) == HOSTS - 1, "not every host has dialled")
        # All of them wait to be accepted, and the hard limit is not enough for that.
        assert len(os.listdir(f"/proc/{agent}/fd")) + HOSTS - 1 > FILES
    values = job.values()
    assert {value["hosts"] for value in values} == {HOSTS}
    assert values[0]["agent"]["children"] == "3"
