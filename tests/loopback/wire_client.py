"""Clients of the store protocol for tests: torch's own, and one that sends what it is told."""

from __future__ import annotations

import socket
import struct
import time
from datetime import timedelta

import torch.distributed as dist

TOKEN = "0f3a55c1d2e3b4a7.0"  # as long as an agent's
LIMIT = 8 * 1024 * 1024
MAX_KEY = 8 * 1024
MAGIC = 0x3C85F7CE
SECONDS = timedelta(seconds=1)

(VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, GETNUMKEYS, DELETE_KEY, APPEND) = range(10)
(MULTI_GET, MULTI_SET, CANCEL_WAIT, PING, QUEUE_PUSH, QUEUE_POP, QUEUE_LEN) = range(10, 17)
(LIST, BAR) = range(17, 19)


def connect(host, port, token, timeout=30 * SECONDS):
    client = dist.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(token, client)


def text(value: bytes) -> bytes:
    return struct.pack("=Q", len(value)) + value


def frame(op, *parts):
    """bytes are a key or a value, ints 8 bytes, a list its length and its bytes."""
    out = bytes([op])
    for part in parts:
        if isinstance(part, list):
            out += struct.pack("=Q", len(part)) + b"".join(map(text, part))
        else:
            out += text(part) if isinstance(part, bytes) else struct.pack("=q", part)
    return out


HELLO = bytes([VALIDATE]) + struct.pack("=I", MAGIC)


class Raw:
    """A client that sends what it is told, and reads exactly what it expects."""

    def __init__(self, host, port, hello=HELLO):
        self.socket = socket.create_connection((host, port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.send(hello)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)

    def read(self, size):
        got = b""
        while len(got) < size:
            more = self.socket.recv(size - len(got))
            assert more, f"the server closed the connection after {got!r}"
            got += more
        return got

    def value(self):
        return self.read(struct.unpack("=Q", self.read(8))[0])

    def number(self):
        return struct.unpack("=q", self.read(8))[0]

    def silent(self):
        """Nothing comes back before the answer to a PING."""
        self.send(bytes([PING]) + b"ping")
        return self.read(4) == b"ping"

    def closed(self):
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


def settle(condition, seconds=20.0):
    """Wait until the condition holds; a server notices a closed connection a little later."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "still not so after the deadline"
        time.sleep(0.005)


KEY = f"/{TOKEN}/".encode()

#: (frame, what comes back): all operations, in an order in which each has something to find.
CONVERSATION = [
    (bytes([PING]) + b"\1\2\3\4", b"\1\2\3\4"),
    (frame(SET, KEY + b"a", b"1"), b""),
    (frame(GET, KEY + b"a"), text(b"1")),
    (frame(GET, KEY + b"missing"), text(b"")),
    (frame(ADD, KEY + b"a", 6), struct.pack("=q", 7)),
    (frame(COMPARE_SET, KEY + b"a", b"7", b"8"), text(b"8")),
    (frame(APPEND, KEY + b"a", b"\0\xff"), b""),
    (frame(MULTI_SET, [])[:1] + struct.pack("=Q", 0), b""),
    (
        bytes([MULTI_SET])
        + struct.pack("=Q", 3)
        + b"".join(text(KEY + k) + text(v) for k, v in [(b"x", b"1"), (b"y", b""), (b"x", b"2")]),
        b"",
    ),
    (
        frame(MULTI_GET, [KEY + b"x", KEY + b"a", KEY + b"y"]),
        b"".join(map(text, (b"2", b"8\0\xff", b""))),
    ),
    (frame(CHECK, [KEY + b"x", KEY + b"y"]), b"\0"),
    (frame(CHECK, [KEY + b"x", KEY + b"z"]), b"\1"),
    (frame(CHECK, []), b"\0"),
    (frame(WAIT, [KEY + b"x", KEY + b"x"]), b"\0"),
    (frame(WAIT, []), b"\0"),
    (bytes([CANCEL_WAIT]), b"\1"),
    (bytes([GETNUMKEYS]), struct.pack("=q", 3)),
    (frame(DELETE_KEY, KEY + b"x"), struct.pack("=q", 1)),
    (frame(DELETE_KEY, KEY + b"x"), struct.pack("=q", 0)),
    (frame(QUEUE_PUSH, KEY + b"q", b"e1"), b""),
    (frame(QUEUE_PUSH, KEY + b"q", b"e2"), b""),
    (frame(QUEUE_LEN, KEY + b"q"), struct.pack("=q", 2)),
    (frame(QUEUE_POP, KEY + b"q"), struct.pack("=q", 2) + text(b"e1")),
    (frame(QUEUE_POP, KEY + b"q"), struct.pack("=q", 1) + text(b"e2")),
    (frame(QUEUE_POP, KEY + b"q"), struct.pack("=q", 0)),
    (frame(DELETE_KEY, KEY + b"y"), struct.pack("=q", 1)),
    (bytes([LIST]), struct.pack("=q", 1) + text(KEY + b"a")),
    (frame(BAR, KEY + b"b", 1), b"\0"),
]
