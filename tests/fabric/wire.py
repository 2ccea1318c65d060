"""A cable that is slow, loses packets or carries one direction only: two tap devices and a thread.

`tc` cannot do it everywhere: many kernels come without netem.  What the host sends through its end
is read here frame by frame, kept for as long as the cable is long, and written into the other end.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import stat
import struct
import threading
import time

from commkit.topology import netns

_TUN = "/dev/net/tun"
_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002


def inside(namespace, make):
    """What `make()` returns in a namespace: devices and sockets stay where they are made."""
    with netns.thread_inside(namespace):
        return make()


def _tap(name):
    def make():
        if not os.path.exists(_TUN):  # containers often come without the node
            os.makedirs(os.path.dirname(_TUN), exist_ok=True)
            os.mknod(_TUN, 0o666 | stat.S_IFCHR, os.makedev(10, 200))
        tap = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(
            tap, _TUNSETIFF, struct.pack("16sH22s", name.encode(), _TAP_WITHOUT_HEADER, b"")
        )
        return tap

    return make


class Wire:
    """Plugs a host that has no cable yet into `network`.

    `delay` is seconds one way, `loss` the share of frames that vanish, `rate` bits/s each way;
    set `deaf` and the host hears nothing, `dumb` and nobody hears it.
    """

    def __init__(self, host, address, *, network="net", delay=0.0, loss=0.0, rate=0.0, seed=7):
        fabric = host.fabric
        fabric.network(network)
        far = f"w{fabric.namespaces.index(host.namespace)}"
        self.delay, self.loss, self.rate = delay, loss, rate
        self.deaf = self.dumb = False
        self.carried = self.lost = 0
        self._chance = random.Random(seed)
        self._ends = [inside(host.namespace, _tap("eth0")), inside(fabric.namespace, _tap(far))]
        host.ip(f"addr add {address} dev eth0", "link set eth0 up")
        fabric.ip(f"link set {far} master {network}", f"link set {far} up")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        waiting, number = [], 0
        free = [0.0, 0.0]  # when each direction has sent what it was given
        while not self._over.is_set():
            until = waiting[0][0] - time.monotonic() if waiting else 0.1
            ready, _, _ = select.select(self._ends, [], [], min(0.1, max(0.0, until)))
            for end in ready:
                side = self._ends.index(end)
                with contextlib.suppress(BlockingIOError):
                    while frame := os.read(end, 65536):
                        silent = self.dumb if side == 0 else self.deaf
                        if silent or self._chance.random() < self.loss:
                            self.lost += 1
                            continue
                        now = time.monotonic()
                        if self.rate:
                            free[side] = max(now, free[side]) + 8 * len(frame) / self.rate
                            now = free[side]
                        number += 1
                        heapq.heappush(waiting, (now + self.delay, number, 1 - side, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, side, frame = heapq.heappop(waiting)
                self.carried += 1
                with contextlib.suppress(BlockingIOError, OSError):
                    os.write(self._ends[side], frame)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join(10)
        for end in self._ends:
            os.close(end)
