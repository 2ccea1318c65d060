"""Ranks for a program: forked from it once it has imported what they need.

The programs of this directory are run twice, by `python` and by `python -m commkit run`, and print
what their ranks have found.  They know nothing of commkit but how to tell who started a world.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
import traceback


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def by_commkit():
    """Whether this process's default group stands on commkit's tree."""
    api = sys.modules.get("commkit.api")
    return api is not None and api.is_initialized()


def _rank(pipe, environment, body, arguments):
    os.environ.update(environment)
    try:
        answer = {"value": body(*arguments)}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    pipe.send(answer)
    pipe.close()


def run(world_size, body, *arguments, deadline):
    """What `body` returns in each rank, by rank; ends the program if one fails or is too late."""
    # Only here: it takes the place of what commkit run has replaced in multiprocessing.
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("fork")
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    until = time.monotonic() + deadline
    started = {}
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context.Process(target=_rank, args=(theirs, environment, body, arguments))
        process.start()
        theirs.close()
        started[ours] = rank, process
    values, errors, waiting = {}, {}, set(started)
    while waiting and time.monotonic() < until:
        left = until - time.monotonic()
        if errors:
            left = min(left, 10.0)  # what the others say of it
        ready = multiprocessing.connection.wait(list(waiting), left)
        if errors and not ready:
            break
        for pipe in ready:
            waiting.remove(pipe)
            rank, process = started[pipe]
            try:
                answer = pipe.recv()
            except EOFError:
                process.join(10)
                answer = {"error": f"ended with exit code {process.exitcode}"}
            if "error" in answer:
                errors[rank] = answer["error"]
            else:
                values[rank] = answer["value"]
    for pipe in waiting:
        rank, process = started[pipe]
        errors[rank] = f"no result after {deadline:.0f} s"
        os.kill(process.pid, signal.SIGKILL)
    for _, process in started.values():
        process.join(30)
        if process.is_alive():
            process.kill()
    if errors:
        for rank, error in sorted(errors.items())[:8]:
            print(f"rank {rank}: {error}", file=sys.stderr)
        sys.exit(f"{len(errors)} of {world_size} ranks failed: {sorted(errors)}")
    return [values[rank] for rank in range(world_size)]


def each(names, run_one):
    """{name: result, or a line about those ranks that failed}: the other names have their turn."""
    found = {}
    for name in names:
        try:
            found[name] = run_one(name)
        except SystemExit as error:
            print(f"{name}: {error}", file=sys.stderr)
            found[name] = f"{name}: {error}"
    return found


def report(value):
    """The program's result, as its last line."""
    print(json.dumps(value), flush=True)
