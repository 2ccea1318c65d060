"""One task of a step of srun without torch: joins, does what its arguments say, reports.

What it says is one JSON object a line at the end of the file RESULTS (srun cuts long lines of
standard output into pieces); each holds the task's rank.
    step.py meet            gathers every rank's host, leaves
    step.py stay FILE       the same, but stays in the world until FILE exists
    step.py watch           waits for a loss, and says with which error the next operation failed
    step.py without RANK    that rank never joins
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from commkit import launch, overlay
from commkit.errors import CommkitError


def say(**what):
    # Below mpiexec SLURM_PROCID is that of its daemon.
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    line = {"rank": int(next(filter(None, map(os.environ.get, names)))), **what}
    file = os.open(os.environ["RESULTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, (json.dumps(line) + "\n").encode())
    os.close(file)


def watch(world):
    deadline = time.monotonic() + 40
    while not world.failures() and time.monotonic() < deadline:
        time.sleep(0.02)
    world.barrier(timeout=5.0)


def stay(world, file):
    deadline = time.monotonic() + 40
    while not Path(file).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    world.barrier(timeout=20.0)


def main(body, *arguments):
    host = socket.gethostname()
    here = {"pid": os.getpid(), "host": host, "job": os.environ["SLURM_JOB_ID"]}
    try:
        spec = launch.resolve()
        say(event="starts", **here)
        if body == "without" and spec.rank == int(arguments[0]):
            signal.pause()
        world = overlay.join(spec, 40.0, notice=lambda kind, text: say(notice=text))
        me = world.identity
        names = world.all_gather(f"{me.rank}@{host}".encode(), timeout=20.0)
        say(
            event="met",
            names=[name.decode() for name in names],
            local=[me.local_rank, me.local_world_size],
            epoch=me.epoch,
            hosts=me.hosts,
            root=[spec.root.kind, spec.root.host, spec.root.here],
            job_id=spec.job_id,
            slurm={name: value for name, value in os.environ.items() if name.startswith("SLURM")},
        )
        if body in ("watch", "stay"):
            globals()[body](world, *arguments)
        world.leave(10.0)
    except CommkitError as error:
        say(error=type(error).__name__, text=str(error))
        sys.exit(3)


main(*sys.argv[1:])
