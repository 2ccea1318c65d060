"""A DNS server on a fabric's network: writes down what is asked, knows what a test tells it."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time

_CLONE_NEWNET = 0x40000000
_A, _FLAGS_FOUND, _FLAGS_NO_SUCH_NAME = 1, b"\x81\x80", b"\x81\x83"


def _socket_inside(namespace, address):
    """A UDP socket on port 53; a socket stays in the namespace where it was made."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    target = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        assert libc.setns(target, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind((address, 53))
    finally:
        assert libc.setns(own, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(own)
        os.close(target)
    return made


class Nameserver:
    """Make it before the hosts: their resolv.conf names it.  `names`: name -> IPv4."""

    def __init__(self, fabric, address):
        fabric.network("net", f"{address}/24")
        fabric.nameserver = address
        self.names = {}
        self.asked = []
        self._socket = _socket_inside(fabric.namespace, address)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self):
        while True:
            packet, peer = self._socket.recvfrom(4096)
            if not packet:
                return
            labels, at = [], 12
            while packet[at]:
                labels.append(packet[at + 1 : at + 1 + packet[at]].decode())
                at += 1 + packet[at]
            question = packet[12 : at + 5]
            name = ".".join(labels)
            self.asked.append(name)
            address = self.names.get(name)
            flags = _FLAGS_FOUND if address else _FLAGS_NO_SUCH_NAME
            record = b""
            if address and int.from_bytes(question[-4:-2], "big") == _A:
                # The name is the question's; class IN, 0 s to live, four bytes.
                record = bytes.fromhex("c00c 0001 0001 00000000 0004") + socket.inet_aton(address)
            counts = bytes([0, 1, 0, bool(record), 0, 0, 0, 0])
            self._socket.sendto(packet[:2] + flags + counts + question + record, peer)

    def wait_for(self, name, times):
        deadline = time.monotonic() + 20
        while self.asked.count(name) < times:
            assert time.monotonic() < deadline, f"{name} is not looked up: {self.asked}"
            time.sleep(0.02)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        # An empty packet to itself ends the thread.
        self._socket.sendto(b"", self._socket.getsockname())
        self._thread.join(10)
        self._socket.close()
