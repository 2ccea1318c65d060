"""What torch's ranks ask of its TCPStore for Megatron's groups with TORCH_DIST_INIT_BARRIER=1.

  python _store_replay.py RANKS PROCESSES GROUPS      prints one JSON line

RANKS real clients of a real TCPStore, in threads of a few processes.  Of all groups of the set
GROUPS are taken, evenly spread over it (all of them if there are no more).  For each of them, one
after the other as torch creates them: its members exchange an id through the store as NCCL's do,
then every rank goes through torch's own barrier of the whole world
(distributed_c10d._store_based_barrier).

construct: until every client's constructor has returned; groups: then until the last rank is
through the last group's barrier.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import _group_set
import torch.distributed.distributed_c10d as torch_c10d
from torch._C._distributed_c10d import PrefixStore, TCPStore

TIMEOUT = timedelta(seconds=300)
PATIENCE = 550
VALUE = b"x" * 128
c10d: Any = torch_c10d


def chosen(ranks: int, most: int) -> list[tuple[str, list[int]]]:
    """(name, members) of the groups that are replayed."""
    every = [
        (f"{family}/{index}", members)
        for family, groups in _group_set.families(ranks).items()
        for index, members in enumerate(groups)
    ]
    count = min(most, len(every))
    return [every[index * len(every) // count] for index in range(count)]


def serve(ports: Any, finish: Any) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, timeout=TIMEOUT, wait_for_workers=False)
    ports.put(store.port)
    finish.wait()


def one_rank(rank: int, ranks: int, store: Any, groups: list[tuple[str, list[int]]]) -> None:
    for name, members in groups:
        if len(members) > 1 and rank in members:
            its_own = PrefixStore(f"{name}/", store)
            if rank == members[0]:
                its_own.set("0", VALUE)  # type: ignore[arg-type]
            else:
                its_own.get("0")
        c10d._store_based_barrier(rank, store, name, ranks, TIMEOUT)


def clients(
    part: range, ranks: int, port: int, most: int, gates: list[Any], results: Any, counted: Any
) -> None:
    logging.disable(logging.INFO)  # the barrier writes a line of each rank and group
    groups = chosen(ranks, most)
    built: list[float] = []
    finished: list[float] = []
    errors: list[str] = []
    start, second = threading.Event(), threading.Event()

    def one(rank: int) -> None:
        start.wait()
        try:
            store = TCPStore(
                "127.0.0.1", port, None, False, timeout=TIMEOUT, wait_for_workers=False
            )
            built.append(time.monotonic())
            second.wait()
            one_rank(rank, ranks, store, groups)
            finished.append(time.monotonic())
        except Exception as error:
            errors.append(str(error))
            built.append(time.monotonic())

    threading.stack_size(512 * 1024)
    threads = [threading.Thread(target=one, args=(rank,)) for rank in part]
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
    ranks, processes, most = (int(word) for word in sys.argv[1:])
    context = get_context("fork")
    gates = [context.Event() for _ in range(3)]
    results, ports, counted = context.Queue(), context.Queue(), context.Semaphore(0)
    server = context.Process(target=serve, args=(ports, gates[2]), daemon=True)
    server.start()
    port = ports.get(timeout=30)
    parts = [range(i * ranks // processes, (i + 1) * ranks // processes) for i in range(processes)]
    workers = [
        context.Process(
            target=clients, args=(part, ranks, port, most, gates, results, counted), daemon=True
        )
        for part in parts
    ]
    for worker in workers:
        worker.start()

    def all_of_them() -> None:
        for _ in workers:
            if not counted.acquire(timeout=PATIENCE):
                sys.exit(f"TCPStore: the clients did not get there in {PATIENCE} s")

    all_of_them()
    time.sleep(0.2)
    begin = time.monotonic()
    gates[0].set()
    all_of_them()
    middle = time.monotonic()
    gates[1].set()
    rows = [results.get(timeout=PATIENCE) for _ in workers]
    gates[2].set()
    errors = [error for row in rows for error in row[2]]
    if errors:
        sys.exit(f"TCPStore: {errors[0]}")
    groups = chosen(ranks, most)
    print(
        json.dumps(
            {
                "ranks": ranks,
                "groups": len(groups),
                "all_groups": _group_set.count(ranks),
                "construct_seconds": round(max(row[0] for row in rows) - begin, 5),
                "groups_seconds": round(max(row[1] for row in rows) - middle, 5),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
