"""The store protocol frame by frame: in pieces, in bulk, and from clients that misbehave."""

from __future__ import annotations

import random
import re
import runpy
import struct
import threading

import pytest
import torch.distributed as dist
from wire_client import (
    ADD,
    APPEND,
    BAR,
    CANCEL_WAIT,
    CHECK,
    CONVERSATION,
    DELETE_KEY,
    GET,
    HELLO,
    KEY,
    LIMIT,
    LIST,
    MAX_KEY,
    MULTI_GET,
    MULTI_SET,
    PING,
    QUEUE_POP,
    QUEUE_PUSH,
    SET,
    TOKEN,
    WAIT,
    Raw,
    connect,
    frame,
    settle,
    text,
)

# The first test also compiles the module.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def native(repository):
    return runpy.run_path(str(repository / "tests/cpp/native_build.py"))["build"]()


@pytest.fixture(params=[0, 1], ids=["at-once", "late-and-in-any-order"])
def server(native, request):
    return native.Server(TOKEN, seed=request.param)


def one_byte_at_a_time(host, port):
    with Raw(host, port, hello=b"") as client:
        for byte in HELLO:
            client.send(bytes([byte]))
        for sent, expected in CONVERSATION:
            for byte in sent:
                client.send(bytes([byte]))
            assert client.read(len(expected)) == expected, sent


def pipelined(host, port, times):
    """Everything at once; each frame still sees what the one before it has done."""
    with Raw(host, port) as client:
        clean = frame(DELETE_KEY, KEY + b"a") + frame(DELETE_KEY, KEY + b"b")
        whole = b"".join(sent for sent, _ in CONVERSATION) + clean
        expected = b"".join(answer for _, answer in CONVERSATION) + struct.pack("=qq", 1, 1)
        sender = threading.Thread(target=client.send, args=(whole * times,))
        sender.start()
        got = client.read(len(expected) * times)
        sender.join()
        assert got == expected * times


def test_each_frame_one_byte_at_a_time(server):
    one_byte_at_a_time("127.0.0.1", server.port)


def test_pipelined_frames_take_effect_in_order(server):
    pipelined("127.0.0.1", server.port, 300)


@pytest.mark.skipif(not hasattr(dist.Store, "barrier"), reason="this torch has fewer operations")
def test_torchs_own_server_gives_the_same_answers():
    """What is expected here is what torch does, not what we think it does."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    one_byte_at_a_time("127.0.0.1", server.port)


def test_a_write_is_seen_by_the_next_frame(native):
    """SET has no reply: only its own order keeps the GET behind it."""
    server = native.Server(TOKEN, seed=3)
    with Raw("127.0.0.1", server.port) as client:
        for number in range(200):
            value = str(number).encode()
            client.send(frame(SET, KEY + b"k", value) + frame(GET, KEY + b"k"))
            assert client.value() == value


def test_equal_keys_of_one_multi_set_keep_their_order(native):
    server = native.Server(TOKEN, seed=7)
    with Raw("127.0.0.1", server.port) as client:
        for _ in range(50):
            pairs = [(KEY + b"k", str(i).encode()) for i in range(20)]
            body = b"".join(text(key) + text(value) for key, value in pairs)
            client.send(bytes([MULTI_SET]) + struct.pack("=Q", 20) + body + frame(GET, KEY + b"k"))
            assert client.value() == b"19"


def test_thousands_of_keys_in_one_frame(server):
    names = [KEY + str(number).encode() for number in range(5000)]
    with Raw("127.0.0.1", server.port) as client:
        body = b"".join(text(name) + text(name[-3:]) for name in names)
        client.send(bytes([MULTI_SET]) + struct.pack("=Q", len(names)) + body)
        client.send(frame(WAIT, names) + frame(CHECK, names) + frame(MULTI_GET, names))
        assert client.read(2) == b"\0\0"
        assert [client.value() for _ in names] == [name[-3:] for name in names]


def test_only_a_cancellation_overtakes_a_wait(server):
    with Raw("127.0.0.1", server.port) as client, Raw("127.0.0.1", server.port) as other:
        client.send(frame(WAIT, [KEY + b"k", KEY + b"l"]) + bytes([PING]) + b"1234")
        settle(lambda: server.counters()["waiting"] == 2)
        other.send(frame(SET, KEY + b"k", b"") + frame(SET, KEY + b"l", b""))
        assert client.read(5) == b"\0" + b"1234"
        client.send(frame(WAIT, [KEY + b"never"]))
        settle(lambda: server.counters()["waiting_sessions"] == 1)
        client.send(bytes([CANCEL_WAIT]))
        assert client.read(1) == b"\1"
        assert server.counters()["waiting"] == 0
        other.send(frame(SET, KEY + b"never", b""))
        assert client.silent()


def test_a_client_that_goes_away_leaves_no_wait_behind(server):
    with Raw("127.0.0.1", server.port) as client:
        client.send(frame(WAIT, [KEY + str(i).encode() for i in range(100)]))
        settle(lambda: server.counters()["waiting"] == 100)
    settle(lambda: server.counters()["waiting"] == 0 and server.counters()["connections"] == 0)


def test_one_element_wakes_one_of_those_who_wait_for_the_queue(server):
    with Raw("127.0.0.1", server.port) as a, Raw("127.0.0.1", server.port) as b:
        a.send(frame(WAIT, [KEY + b"q"]))
        settle(lambda: server.counters()["waiting"] == 1)
        b.send(frame(WAIT, [KEY + b"q"]))
        settle(lambda: server.counters()["waiting"] == 2)
        with Raw("127.0.0.1", server.port) as pusher:
            pusher.send(frame(QUEUE_PUSH, KEY + b"q", b"1"))
            assert a.read(1) == b"\0"
            assert server.counters()["waiting"] == 1
            a.send(frame(QUEUE_POP, KEY + b"q"))
            assert (a.number(), a.value()) == (1, b"1")
            pusher.send(frame(QUEUE_PUSH, KEY + b"q", b"2"))
            assert b.read(1) == b"\0"


# --- Clients that misbehave -------------------------------------------------------------------

OTHER = b"/another/"
HOSTILE = {
    "a web browser": (b"GET / HTTP/1.1\r\n\r\n", "not a TCPStore client: its first byte is 71"),
    "nonsense": (b"\xff" * 64, "its first byte is 255, expected 0"),
    "a wrong magic number": (b"\0\1\2\3\4", "without torch's magic number"),
    "VALIDATE twice": (HELLO * 2, "VALIDATE twice"),
    "an operation of the future": (HELLO + bytes([19]), "operation 19 is unknown.*newer"),
    "an endless key": (
        HELLO + b"\1" + struct.pack("=Q", 1 << 63),
        "SET: a key of 9223372036854775808",
    ),
    "a long key": (HELLO + b"\3" + struct.pack("=Q", MAX_KEY + 1), "a key of 8193 bytes.*8192"),
    "an endless value": (
        HELLO + frame(SET, KEY + b"k") + b"\xff" * 8,
        "SET: a value of 18446744073709551615 bytes, expected at most 8388608",
    ),
    "a value over the limit": (
        HELLO + frame(APPEND, KEY + b"k") + struct.pack("=Q", LIMIT + 1),
        "APPEND: a value of 8388609",
    ),
    "too many keys": (
        HELLO + bytes([WAIT]) + struct.pack("=Q", 128 * 1024 + 1),
        "WAIT of 131073 keys, expected at most 131072",
    ),
    "a key without a token": (HELLO + frame(GET, b"plain"), "GET: key 'plain' has no job's token"),
    "an empty key": (HELLO + frame(GET, b""), "key '' has no job's token"),
    "a token without a key": (HELLO + frame(GET, b"/token"), "key '/token' has no job's token"),
    "another job": (HELLO + frame(GET, OTHER + b"k"), "token of another job: 'another'"),
    "a second job": (
        HELLO + frame(SET, KEY + b"k", b"") + frame(GET, OTHER + b"k"),
        "a second token, 'another', on a connection of",
    ),
    "a second job in one frame": (
        HELLO + frame(WAIT, [KEY + b"never", OTHER + b"k"]),
        "a second token",
    ),
    "a reader of everything": (HELLO + bytes([LIST]), "LIST_KEYS before any key"),
    "an addition to text": (
        HELLO + frame(SET, KEY + b"t", b"text") + frame(ADD, KEY + b"t", 1),
        "ADD was refused: key t holds 'text', expected a decimal number",
    ),
    "a barrier on text": (
        HELLO + frame(SET, KEY + b"t", b"") + frame(BAR, KEY + b"t", 2),
        "BARRIER was refused",
    ),
}


def hostile(host, port, token, sent):
    """The connection is closed, and the next client is served."""
    with Raw(host, port, hello=sent) as client:
        assert client.closed()
    store = connect(host, port, token)
    store.set("alive", "1")
    assert store.get("alive") == b"1"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_violation_is_dropped_with_a_reason(server, name):
    sent, reason = HOSTILE[name]
    hostile("127.0.0.1", server.port, TOKEN, sent)
    (why,) = server.drops()
    assert re.search(reason, why)
    assert "\n" not in why
    assert server.counters()["waiting"] == 0


def test_announced_bytes_take_no_memory(server):
    """128 clients announce 1 GiB together; memory follows what they sent."""

    def resident():
        with open("/proc/self/statm") as status:
            return int(status.read().split()[1]) * 4096

    before = resident()
    clients = [Raw("127.0.0.1", server.port) for _ in range(128)]
    for client in clients:
        client.send(frame(SET, KEY + b"k") + struct.pack("=Q", LIMIT) + b"x" * 1000)
    settle(lambda: server.counters()["connections"] == 128)
    connect("127.0.0.1", server.port, TOKEN).set("a", "1")
    assert resident() - before < 128 << 20
    assert server.drops() == []
    for client in clients:
        client.socket.close()


def test_random_bytes_never_harm_other_clients(server):
    rng = random.Random(2)
    victim = connect("127.0.0.1", server.port, TOKEN)
    victim.set("kept", "value")
    whole = b"".join(sent for sent, _ in CONVERSATION).replace(KEY, KEY + b"fuzz/")
    for _ in range(300):
        broken = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        with Raw("127.0.0.1", server.port) as client:
            client.send(bytes(broken[rng.randrange(len(broken)) :]))
    assert victim.get("kept") == b"value"
    settle(lambda: server.counters()["connections"] == 1)
    assert server.counters()["waiting"] == 0


def test_a_client_that_never_reads_is_held_back(server):
    """Its frames stay in its socket instead of becoming replies in our memory."""
    blob = b"x" * LIMIT
    with Raw("127.0.0.1", server.port) as client:
        client.send(frame(SET, KEY + b"k", blob))
        client.send(frame(GET, KEY + b"k") * 500)  # 4 GiB, if it were answered
        store = connect("127.0.0.1", server.port, TOKEN)
        store.set("alive", "1")
        assert store.get("alive") == b"1"
        settle(lambda: server.counters()["operations"] >= 3)
        assert server.counters()["operations"] < 50
        assert client.value() == blob
