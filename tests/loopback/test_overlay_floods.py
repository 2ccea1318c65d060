"""Strangers by the hundred while a world forms: the job starts as if they were not there."""

from __future__ import annotations

import contextlib
import resource
import socket
import statistics
import threading
import time

import pytest
from overlay_jobs import until
from test_overlay_strangers import (
    answers,
    connect_and_close,
    frame,
    hello,
    listening,
    send_random,
    speak_http,
    strangers,
)

HOSTS = [2] * 8
#: How much longer than without strangers, and what a busy machine may add.
RATIO, SLACK_SECONDS = 4.0, 1.5
SILENT = 2000


def joins(me):
    world = me.join(30)
    at = time.monotonic()
    world.connected("world", range(me.world_size))
    assert world.leave(10)
    return at


@pytest.fixture(scope="module", autouse=True)
def _many_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def start_of(job):
    """Seconds that the world takes from the start of all but the root to the last one's joining."""
    began = time.monotonic()
    for rank in range(2, job.world):
        job.start(rank, joins)
    return max(job.values()) - began


def root_of(job):
    for rank in (0, 1):
        job.start(rank, joins)
    return listening(job)


@pytest.fixture(scope="module")
def normal(rank_server, tmp_path_factory):
    """The median of three worlds without strangers."""
    from overlay_jobs import Job

    times = []
    for _ in range(3):
        with Job(rank_server, tmp_path_factory.mktemp("normal"), HOSTS) as job:
            root_of(job)
            times.append(start_of(job))
    return statistics.median(times)


def reset(port):
    with socket.create_connection(("127.0.0.1", port), 10) as it:
        it.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def of_another_version(port):
    with socket.create_connection(("127.0.0.1", port), 10) as it:
        it.sendall(frame(64, hello(b"x" * 32), version=9))
        it.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            while it.recv(4096):  # what it is told, and then the end
                pass


def of_another_job(port):
    answers(port, hello(b"y" * 32))


def child_of_another_epoch(port):
    answers(port, hello(b"z" * 32, kind=1))


@contextlib.contextmanager
def again_and_again(stranger, port, threads=2, pause=0.002):
    """Strangers without end while the block runs; how many there were."""
    over, count = threading.Event(), [0] * threads

    def run(index):
        while not over.is_set():
            with contextlib.suppress(ConnectionRefusedError, ConnectionResetError, TimeoutError):
                stranger(port)
                count[index] += 1
            time.sleep(pause)

    running = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield count
    finally:
        over.set()
        for thread in running:
            thread.join(20)


@pytest.mark.parametrize(
    "stranger",
    [
        connect_and_close,
        speak_http,
        send_random,
        of_another_version,
        of_another_job,
        pytest.param(reset, marks=pytest.mark.slow),
        pytest.param(child_of_another_epoch, marks=pytest.mark.slow),
    ],
)
def test_strangers_without_end_do_not_hold_up_a_join(jobs, normal, stranger):
    with jobs(HOSTS) as job:
        port = root_of(job)
        pause = 0.02 if stranger is send_random else 0.002
        with again_and_again(stranger, port, pause=pause) as count:
            until(lambda: sum(count) > 10)
            counted = strangers(job)
            seconds = start_of(job)
        assert counted > 5
    assert seconds < RATIO * normal + SLACK_SECONDS, (seconds, normal)


def test_thousands_of_silent_connections_do_not_hold_up_a_join(jobs, normal):
    with jobs(HOSTS) as job, contextlib.ExitStack() as silent:
        port = root_of(job)
        for _ in range(SILENT):
            it = silent.enter_context(socket.socket())
            it.setblocking(False)
            it.connect_ex(("127.0.0.1", port))
        seconds = start_of(job)
    assert seconds < RATIO * normal + SLACK_SECONDS, (seconds, normal)
