"""What is not of this job on the root's port: dropped and counted, and the job forms."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import time

import pytest
from overlay_jobs import Job, until

from commkit import _C, errors

pytestmark = pytest.mark.timeout(300)  # the first test may have to build the sanitized agent

SECRET = {"COMMKIT_SECRET": "correct horse battery"}


def waits(me):
    world = me.join(30)
    world.barrier(timeout=20)
    world.connected("world", range(me.world_size))
    assert world.leave(10)
    return me.notices


def tries(me, timeout):
    started = time.monotonic()
    try:
        world = me.join(timeout)
        world.leave(5)
    except errors.CommkitError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "joined", "", time.monotonic() - started


def listening(job):
    port = int(job.env["MASTER_PORT"])
    until(lambda: f"listening on port {port}," in job.log_text())
    return port


def strangers(job):
    [count] = [
        int(one["strangers"])
        for one in _C.agents()
        if one.get("log", "").startswith(str(job.directory)) and one.get("role") == "root"
    ]
    return count


def connect_and_close(port):
    socket.create_connection(("127.0.0.1", port), 10).close()


def speak_http(port):
    with socket.create_connection(("127.0.0.1", port), 10) as it:
        it.sendall(b"GET / HTTP/1.0\r\n\r\n")
        it.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert it.recv(100) == b""


def send_random(port):
    with (
        socket.create_connection(("127.0.0.1", port), 10) as it,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        it.sendall(os.urandom(1 << 20))


def frame(kind, payload, version=None):
    header = struct.pack("<IHH", len(payload), kind, PROTOCOL if version is None else version)
    return header + payload


def text(value):
    return struct.pack("<I", len(value)) + value


def hello(job, kind=0, magic=0x31484B43, number=None, world=2):
    """csrc/overlay/hello.cc: the first message of an agent; `number` tells hosts apart."""
    host = b"elsewhere" if number is None else b"host%d" % number
    start = struct.pack("<IB", magic, kind) + text(job) + text(host) + text(b"0.1.0")
    numbers = struct.pack("<Qiii", 0, -1, world, -1) + text(b"")
    people = text(b"machine of " + host) + struct.pack("<IIIB", 7, 4242 + (number or 0), 0, 0)
    addresses = struct.pack("<I", 0) + struct.pack("<H", 0)
    return start + numbers + people + addresses + text(b"nonce")


PROTOCOL = _C.protocol_version()


def answers(port, *payloads, kind=64):
    """What the listener says to these frames before it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), 10) as it:
        it.settimeout(10)
        got = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for payload in payloads:
                it.sendall(frame(kind, payload))
            while part := it.recv(65536):
                got += part
        return got


@pytest.mark.parametrize("stranger", [connect_and_close, speak_http, send_random])
def test_a_stranger_is_counted_and_the_job_forms(checked_jobs, stranger):
    with checked_jobs([1, 1]) as job:
        job.start(0, waits)
        port = listening(job)
        for _ in range(3):
            stranger(port)
        until(lambda: strangers(job) >= 3)
        assert strangers(job) == 3
        assert job.log_text().count("dropped 127.0.0.1:") == 3
        job.start(1, waits)
        job.values()


def test_a_stranger_that_says_three_bytes_and_no_more_is_dropped(jobs):
    with jobs([1, 1]) as job:
        job.start(0, waits)
        with socket.create_connection(("127.0.0.1", listening(job)), 10) as silent:
            silent.sendall(b"abc")
            silent.settimeout(20)
            assert silent.recv(1) == b""
        assert strangers(job) == 1
        job.start(1, waits)
        job.values()


def test_two_hundred_silent_connections_do_not_keep_a_host_out(jobs):
    with jobs([1, 1]) as job, contextlib.ExitStack() as stack:
        job.start(0, waits)
        port = listening(job)
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        job.start(1, waits)
        job.values()


def test_a_scanner_does_not_fill_the_log(jobs):
    with jobs([1, 1]) as job:
        job.start(0, waits)
        port = listening(job)
        for _ in range(300):
            connect_and_close(port)
        until(lambda: strangers(job) == 300)
        assert job.log_text().count("dropped ") <= 30
        job.start(1, waits)
        job.values()


MALFORMED = {
    "empty": b"",
    "magic": hello(b"x" * 32, magic=1),
    "kind": hello(b"x" * 32, kind=9),
    "cut": hello(b"x" * 32)[:40],
    "a length beyond the frame": hello(b"x" * 32)[:5] + b"\xff\xff\xff\xff" + b"x" * 40,
    "many addresses": hello(b"x" * 32)[:-15] + b"\xff\xff\xff\x7f",
    "more behind it": hello(b"x" * 32) + hello(b"x" * 32),
    "a child without a place": hello(b"x" * 32, kind=1),
}


@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_hello_is_counted_once_and_answered_by_nothing(checked_jobs, payload):
    with checked_jobs([1, 1]) as job:
        job.start(0, waits)
        assert answers(listening(job), payload) == b""
        until(lambda: strangers(job))
        assert strangers(job) == 1
        job.start(1, waits)
        job.values()


@pytest.mark.parametrize("kind", [0, 65, 67, 71, 80, 96, 9999])
def test_a_message_out_of_order_is_dropped(checked_jobs, kind):
    with checked_jobs([1, 1]) as job:
        job.start(0, waits)
        answers(listening(job), b"\0" * 64, kind=kind)
        until(lambda: strangers(job))
        job.start(1, waits)
        job.values()


def test_a_hello_of_another_job_is_refused_with_the_owner_and_counted_once(jobs):
    with jobs([1, 1]) as job:
        job.start(0, waits)
        port = listening(job)
        refusal = answers(port, hello(b"x" * 32))
        assert job.env["COMMKIT_JOB_ID"].encode() in refusal
        assert f"agent pid {job.agent_of(0)}".encode() in refusal and b"host-0" in refusal
        # Longer than an agent waits for a hello: nothing more is said of this one.
        until(lambda: strangers(job))
        time.sleep(6)
        assert strangers(job) == 1
        assert "elsewhere" in job.log_text() and "4242" in job.log_text()
        job.start(1, waits)
        job.values()


def test_two_jobs_on_one_port_do_not_disturb_each_other(jobs, rank_server, tmp_path_factory):
    with jobs([1, 1]) as first:
        first.start(0, waits)
        port = listening(first)
        second = Job(rank_server, tmp_path_factory.mktemp("second"), [1, 1], env={
            "MASTER_PORT": str(port)
        })  # fmt: skip
        with second:
            second.start(0, tries, 20)
            second.start(1, tries, 8)
            owner = f"pid {first.agent_of(0)}"
            kind, said, seconds = second.values(0)[0]
            assert kind == "JoinError" and seconds < 18
            assert f"port {port}" in said and owner in said
            kind, said, _ = second.values(1)[0]
            assert kind in ("JoinTimeout", "JoinError")
            assert first.env["COMMKIT_JOB_ID"] in said and owner in said
        first.start(1, waits)
        first.values()


@pytest.mark.parametrize(
    ("root", "other", "said"),
    [
        (SECRET, {"COMMKIT_SECRET": "wrong horse"}, "does not know"),
        (SECRET, {}, "not set here"),
        ({}, SECRET, "and not here"),
    ],
    ids=["wrong", "missing on a host", "missing at the root"],
)
def test_a_secret_that_differs_is_named_on_both_sides(checked_jobs, root, other, said):
    with checked_jobs([1, 1]) as job:
        job.start(0, tries, 4, env=root)
        job.start(1, tries, 4, env=other)
        (_, at_root, _), (kind, text_, _) = job.values()
        assert kind in ("JoinError", "JoinTimeout")
        assert "COMMKIT_SECRET" in text_ and said in text_
        assert "horse" not in text_ + at_root + job.log_text()
        assert "COMMKIT_SECRET" in at_root + job.log_text(0), "the root's side tells nothing"


def test_a_proof_covers_side_nonce_and_hello_each_by_itself(jobs):
    """A proof made for one hello must be none for another, wherever nonce and hello are cut."""
    secret = SECRET["COMMKIT_SECRET"].encode()
    with jobs([1, 1], env=SECRET) as job:
        job.start(0, waits)
        port = listening(job)
        said = hello(hashlib.sha256(b"job " + job.env["COMMKIT_JOB_ID"].encode()).digest())
        with socket.create_connection(("127.0.0.1", port), 10) as it:
            it.settimeout(10)
            it.sendall(frame(64, said))
            challenge = it.recv(65536)
            assert struct.unpack_from("<IHH", challenge) == (len(challenge) - 8, 65, PROTOCOL)
            nonce, proof = challenge[12:28], challenge[32:]
            covered = text(b"acceptor") + text(nonce) + text(said)
            assert proof == hmac.digest(secret, covered, "sha256")
            # Its own proof given back proves nothing.
            it.sendall(frame(66, text(proof)))
            assert it.recv(100) == b""
        until(lambda: strangers(job))
        assert "does not know this job's COMMKIT_SECRET" in job.log_text(0)
        job.start(1, waits)
        job.values()


def test_a_host_with_another_secret_does_not_end_the_job_of_the_others(jobs):
    with jobs([1, 1], env=SECRET) as job:
        job.start(0, waits)
        listening(job)
        job.start(1, tries, 1, env={"COMMKIT_SECRET": ""}, host=7, label="intruder")
        [(kind, text_, _)] = job.values("intruder")
        assert kind in ("JoinError", "JoinTimeout") and "COMMKIT_SECRET" in text_
        job.start(1, waits)
        job.values(0, 1)


def test_a_world_with_a_secret_forms_a_deep_tree(checked_jobs):
    with checked_jobs([1] * 6, env={**SECRET, "COMMKIT_TREE_DEGREE": "1"}) as job:
        job.start_all(waits)
        job.values()


def test_a_port_taken_on_loopback_only_is_told_with_its_address_and_owner(jobs):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with jobs([1, 1], env={"MASTER_PORT": str(port)}) as job:
            job.start(0, tries, 20)
            [(kind, text_, seconds)] = job.values()
    assert kind == "JoinError" and seconds < 18
    assert f"port {port}" in text_ and f"pid {os.getpid()}" in text_


def test_agents_advertise_numeric_addresses_only(jobs):
    with jobs([1, 1], env={"MASTER_ADDR": "localhost"}) as job:
        job.start_all(waits)
        job.values()
        for line in job.log_text().splitlines():
            if "addresses" in line:
                for word in line.partition("addresses")[2].split():
                    socket.getaddrinfo(word, 0, flags=socket.AI_NUMERICHOST)
