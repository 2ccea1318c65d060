"""Places in the tree: hosts that nobody awaits, a port that cannot be had, a window of contacts."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import time

import pytest
from overlay_jobs import until
from test_overlay_strangers import frame, hello, listening, text, tries

pytestmark = pytest.mark.timeout(120)

CONTACT, WELCOME, FAIL_UP, GO, FAIL_DOWN = 64, 69, 81, 96, 97


@contextlib.contextmanager
def contact(job, number, world):
    """A host that asks the root for its place, and then says only what the test sends."""
    name = hashlib.sha256(b"job " + job.env["COMMKIT_JOB_ID"].encode()).digest()
    with socket.create_connection(("127.0.0.1", int(job.env["MASTER_PORT"])), 5) as it:
        it.sendall(frame(CONTACT, hello(name, number=number, world=world)))
        yield it


def frames(connection):
    """The types of what comes until it is silent for a second."""
    connection.settimeout(1)
    data = b""
    with contextlib.suppress(TimeoutError):
        while part := connection.recv(65536):
            data += part
    types = []
    while len(data) >= 8:
        size, kind, _ = struct.unpack_from("<IHH", data)
        types.append(kind)
        data = data[8 + size :]
    return types


def test_a_host_whose_ranks_nobody_awaits_is_told_that_the_world_has_formed_without_it(jobs):
    with jobs([1, 1], env={"LOCAL_WORLD_SIZE": "1"}) as job:
        job.start(0, tries, 20)
        listening(job)
        with contact(job, 0, 2) as superfluous:
            until(lambda: "host0" in job.log_text(0) or job.agents())
            time.sleep(0.2)
            job.start(1, tries, 20)
            assert [kind for kind, *_ in job.values(0, 1)] == ["joined", "joined"]
            types = frames(superfluous)
    assert WELCOME in types and FAIL_DOWN in types and GO not in types


def test_the_root_takes_contacts_again_after_a_join_that_failed_with_its_window_full(jobs):
    with jobs([1, 1], env={"WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "1"}) as job:
        job.start(0, tries, 40)
        listening(job)
        with contextlib.ExitStack() as held:
            first = held.enter_context(contact(job, 0, 64))
            for number in range(1, 64):
                held.enter_context(contact(job, number, 64))
            time.sleep(0.25)
            first.sendall(frame(FAIL_UP, text(b"join") + text(b"host0 gives up")))
            [(kind, said, _)] = job.values(0)
            assert kind == "JoinError" and "host0 gives up" in said
        job.start(0, tries, 20, label="again")
        job.start(1, tries, 20)
        until(lambda: "has answered" in job.log_text(1), 5)
        job.outcomes("again", 1)


def cycles(me, count):
    for _ in range(count):
        world = me.join(20)
        time.sleep(0.02 * (me.rank == 2))
        world.leave(5)


def test_an_agent_that_cannot_listen_outlives_epochs_shorter_than_its_tries(checked_jobs):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with checked_jobs([1, 2], env={"COMMKIT_PORT_RANGE": f"{port}-{port}"}) as job:
            job.start_all(cycles, 10)
            job.values()
