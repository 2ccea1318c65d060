"""Bulk TCP flows on a lab with chosen five-tuples, all from one event loop."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time

from commkit.topology import netns

RESET = struct.pack("ii", 1, 0)


def _socket(stack, lab, address):
    host, _ = lab.place_of(address)
    with netns.thread_inside(lab.namespace(host)):
        made = stack.enter_context(
            socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        )
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Closed by a reset: no TIME_WAIT, the next run has the same ports.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    return made


def run(lab, flows, seconds=1.5, settle=0.5):
    """Bytes/s that each flow gets while all of them send as fast as they can.

    Counted after `settle` seconds, when slow start is over.  What arrives is dropped in the kernel.
    """
    with contextlib.ExitStack() as stack:
        ends = []
        for flow in flows:
            with contextlib.ExitStack() as listening:
                listener = _socket(listening, lab, flow.destination)
                listener.bind((flow.destination, flow.destination_port))
                listener.listen(1)
                sender = _socket(stack, lab, flow.source)
                sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)
                sender.settimeout(10)
                sender.bind((flow.source, flow.source_port))
                sender.connect((flow.destination, flow.destination_port))
                receiver = stack.enter_context(listener.accept()[0])
            ends.append((sender, receiver))
        loop = stack.enter_context(select.epoll())
        role = {}
        for i, (sender, receiver) in enumerate(ends):
            for one, mask in ((sender, select.EPOLLOUT), (receiver, select.EPOLLIN)):
                one.setblocking(False)
                loop.register(one, mask)
                role[one.fileno()] = i, one is sender
        payload, sink, got = bytes(1 << 16), bytearray(1 << 18), [0] * len(flows)
        before, start = [], time.monotonic()
        while not before or time.monotonic() < start + seconds:
            if not before and time.monotonic() > start + settle:
                before, start = list(got), time.monotonic()
            for fd, _ in loop.poll(0.05):
                i, sends = role[fd]
                with contextlib.suppress(BlockingIOError):
                    if sends:
                        ends[i][0].send(payload)
                    else:
                        got[i] += ends[i][1].recv_into(sink, len(sink), socket.MSG_TRUNC)
        took = time.monotonic() - start
    return [(b - a) / took for a, b in zip(before, got, strict=True)]
