"""A DNS server on a fabric's network: writes down what is asked, knows what a test tells it."""

from __future__ import annotations

import socket
import threading
import time

from wire import inside

_A, _AAAA = 1, 28
_FOUND, _NO_SUCH_NAME, _FAILED = b"\x81\x80", b"\x81\x83", b"\x81\x82"
#: Instead of addresses: the server says that it cannot tell, or says nothing.
SERVFAIL, SILENCE = "SERVFAIL", "SILENCE"


def _socket_on(address):
    def make():
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind((address, 53))
        return made

    return make


def _records(kind, addresses):
    family = socket.AF_INET if kind == _A else socket.AF_INET6
    found = []
    for address in addresses:
        if (":" in address) == (kind == _AAAA) and kind in (_A, _AAAA):
            data = socket.inet_pton(family, address)
            # The name is the question's; the class is IN; 0 s to live.
            head = bytes.fromhex("c00c") + kind.to_bytes(2, "big") + bytes.fromhex("0001 00000000")
            found.append(head + len(data).to_bytes(2, "big") + data)
    return found


class Nameserver:
    """Make it before the hosts: their resolv.conf names it.

    `names`: name -> an address, a tuple of addresses, SERVFAIL or SILENCE; others do not exist.
    """

    def __init__(self, fabric, address):
        fabric.network("net", f"{address}/24")
        fabric.nameserver = address
        self.names = {}
        self.asked = []
        self._socket = inside(fabric.namespace, _socket_on(address))
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
            known = self.names.get(name)
            self.asked.append(name)
            if known == SILENCE:
                continue
            records, flags = [], _FAILED if known == SERVFAIL else _NO_SUCH_NAME
            if known and known != SERVFAIL:
                addresses = (known,) if isinstance(known, str) else known
                records = _records(int.from_bytes(question[-4:-2], "big"), addresses)
                flags = _FOUND
            counts = bytes([0, 1, 0, len(records), 0, 0, 0, 0])
            self._socket.sendto(packet[:2] + flags + counts + question + b"".join(records), peer)

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
