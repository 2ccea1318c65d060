"""N clients of torch's TCPStore against its own server, in threads of a few processes.

  python _tcpstore.py RANKS PROCESSES      prints one JSON line

construct: until every client's constructor has returned.  set_wait: then every client sets its key
of 128 bytes and waits for its neighbour's, which is what an exchange of ids does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

from torch._C._distributed_c10d import TCPStore

TIMEOUT = timedelta(seconds=120)
VALUE = "x" * 128


def serve(port_out: Any, finish: Any) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, timeout=TIMEOUT, wait_for_workers=False)
    port_out.put(store.port)
    finish.wait()


def clients(
    ranks: range, world: int, port: int, gates: list[Any], results: Any, counted: Any
) -> None:
    built, ready, finished = [], [], []
    start, second = threading.Event(), threading.Event()
    errors: list[str] = []

    def one(rank: int) -> None:
        start.wait()
        try:
            store = TCPStore(
                "127.0.0.1", port, None, False, timeout=TIMEOUT, wait_for_workers=False
            )
            built.append(time.monotonic())
            ready.append(store)
            second.wait()
            store.set(f"key{rank}", VALUE)
            store.wait([f"key{(rank + 1) % world}"])
            finished.append(time.monotonic())
        except Exception as error:
            errors.append(str(error))
            built.append(time.monotonic())

    threading.stack_size(256 * 1024)
    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    counted.release()
    gates[0].wait()
    start.set()
    while len(built) < len(threads):
        time.sleep(0.0005)
    counted.release()
    gates[1].wait()
    second.set()
    for thread in threads:
        thread.join()
    results.put((max(built), max(finished, default=0.0), errors[:1]))
    gates[2].wait()
    os._exit(0)


def main() -> int:
    world, processes = int(sys.argv[1]), int(sys.argv[2])
    context = get_context("fork")
    gates = [context.Event() for _ in range(3)]
    results, ports, counted = context.Queue(), context.Queue(), context.Semaphore(0)
    server = context.Process(target=serve, args=(ports, gates[2]), daemon=True)
    server.start()
    port = ports.get(timeout=30)
    parts = [range(i * world // processes, (i + 1) * world // processes) for i in range(processes)]
    workers = [
        context.Process(
            target=clients, args=(part, world, port, gates, results, counted), daemon=True
        )
        for part in parts
    ]
    for worker in workers:
        worker.start()

    def all_of_them() -> None:
        for _ in workers:
            if not counted.acquire(timeout=150):
                sys.exit("TCPStore: the clients did not get there in 150 s")

    all_of_them()
    time.sleep(0.2)
    begin = time.monotonic()
    gates[0].set()
    all_of_them()
    middle = time.monotonic()
    gates[1].set()
    rows = [results.get(timeout=150) for _ in workers]
    gates[2].set()
    errors = [error for row in rows for error in row[2]]
    if errors:
        sys.exit(f"TCPStore: {errors[0]}")
    print(
        json.dumps(
            {
                "ranks": world,
                "construct_seconds": round(max(row[0] for row in rows) - begin, 5),
                "set_wait_seconds": round(max(row[1] for row in rows) - middle, 5),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
