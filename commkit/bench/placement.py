"""Which world this process belongs to, and whether that can be true."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from commkit import launch
from commkit.errors import LaunchError, UsageError
from commkit.launch import LaunchSpec

#: How many processes a launcher says it started, or a batch job asked for.
_SIZES = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PMIX_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
)
#: Names (15 characters, as the kernel keeps them) of processes whose children are ranks.
_STARTERS = frozenset(
    {"hydra_pmi_proxy", "orted", "prted", "prterun", "slurmstepd", "mpirun", "mpiexec"}
    | {"mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi", "palsd", "jsrun"}
)
#: ... and by which some of them reach other hosts.
_REMOTE = frozenset({"ssh", "srun", "rsh", "qrsh"})
_LINGER = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """This rank, and how its world is started.

    `init_method` is None where the launcher's environment says it all; `forked` means that the
    ranks of this host share its GPUs by local rank.
    """

    spec: LaunchSpec
    init_method: str | None = None
    forked: bool = False

    @property
    def rank(self) -> int:
        return self.spec.rank

    @property
    def world_size(self) -> int:
        return self.spec.world_size


def from_environment(nproc: int, environ: Mapping[str, str] | None = None) -> Place:
    """The world that the launcher describes.

    Raises LaunchError where the environment is wrong, or where it describes one rank although
    something says that there are more: N worlds of one would each report plausible numbers.
    Raises UsageError for --nproc inside a job that has started its ranks.
    """
    environ = os.environ if environ is None else environ
    spec = launch.resolve(environ)
    if nproc and spec.world_size > 1:
        origin = spec.origins.get("world_size") or f"launcher {spec.launcher}"
        raise UsageError(
            f"--nproc {nproc}: this process already is rank {spec.rank} of {spec.world_size} "
            f"({origin}); leave out --nproc, or start commkit outside the job"
        )
    if not nproc and spec.world_size == 1:
        hint = more_than_one(environ)
        if not hint and (hint := siblings()):
            # Siblings that come here later are to see this process.
            time.sleep(_LINGER)
        if hint:
            raise LaunchError(
                f"{hint}, but this process is a world of one: start it with the launcher whose "
                "variables it reads (srun, torchrun, mpiexec), set MASTER_ADDR, MASTER_PORT, RANK "
                "and WORLD_SIZE, or give --nproc 1 for one rank on purpose"
            )
    return Place(spec)


def more_than_one(environ: Mapping[str, str]) -> str:
    """The variable that counts more than one process, or ''."""
    for name in _SIZES:
        value = environ.get(name, "")
        if value.isdecimal() and int(value) > 1:
            return f"{name}={value}"
    return ""


def siblings(pid: int | None = None, proc: Path = Path("/proc")) -> str:
    """Says so if a process launcher also started other processes here, else ''.

    That is a launcher whose variables did not reach this process: another MPI's, or an `env -i`
    on the way.  What the others run is not compared: they may not have come to it yet.
    """
    me = str(os.getpid() if pid is None else pid)
    try:
        parent = _parent(proc, me)
        name = (proc / parent / "comm").read_text().strip()
    except (OSError, ValueError):
        return ""
    if name not in _STARTERS:
        return ""
    others = 0
    for entry in proc.iterdir():
        if not entry.name.isdecimal() or entry.name == me:
            continue
        try:
            if _parent(proc, entry.name) == parent:
                others += (entry / "comm").read_text().strip() not in _STARTERS | _REMOTE
        except (OSError, ValueError):
            continue  # it ended
    return f"{name} (pid {parent}) started {others + 1} processes" if others else ""


def _parent(proc: Path, pid: str) -> str:
    # The name in parentheses may hold spaces and parentheses: state and parent follow the last.
    return (proc / pid / "stat").read_text().rpartition(")")[2].split()[1]
