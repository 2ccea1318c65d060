"""Variables, which notes what was read, and Found: what one launcher says of this process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from commkit.errors import LaunchError

#: A rank, a size: no sign, no more digits than any world needs.
NUMBER = re.compile("[0-9]{1,9}")

#: Variables by which a launcher shows; those set but not used are reported as ignored.
SIGNS = re.compile(
    r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_(RUN_ID|USE_AGENT_STORE)"
    r"|SLURM_(PROCID|LOCALID|NODEID|NTASKS|STEP_ID|STEP_NUM_TASKS|STEP_NODELIST|JOB_NODELIST)"
    r"|SLURM_(STEP_)?TASKS_PER_NODE"
    r"|OMPI_COMM_WORLD_(LOCAL_)?(RANK|SIZE)|PMI_(RANK|SIZE)|MPI_LOCAL(RANKID|NRANKS)"
    r"|PMIX_(RANK|NAMESPACE)|(MV2|MVP)_COMM_WORLD_(LOCAL_)?(RANK|SIZE)"
    r"|JOB_COMPLETION_INDEX|PET_(NNODES|NODE_RANK|NPROC_PER_NODE|MASTER_ADDR|MASTER_PORT)"
    r"|PET_RDZV_ENDPOINT|LWS_(LEADER_ADDRESS|GROUP_SIZE|WORKER_INDEX)|VC_TASK_INDEX"
)


class Variables:
    """The environment; notes what was used.  An empty value counts as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.used: set[str] = set()

    def text(self, *names: str) -> tuple[str, str]:
        """(name, value) of the first that is set; ("", "") if none is."""
        for name in names:
            if value := self._environ.get(name, "").strip():
                self.used.add(name)
                return name, value
        return "", ""

    def has(self, *names: str) -> bool:
        """Are all of them set?  Looking does not count as using."""
        return all(self._environ.get(name, "").strip() for name in names)

    def peek(self, name: str) -> str:
        return self._environ.get(name, "").strip()

    def matching(self, pattern: str) -> dict[str, str]:
        """Those set whose whole name fits `pattern`, without counting as used."""
        return {n: self.peek(n) for n in self._environ if re.fullmatch(pattern, n) and self.has(n)}

    def ignored(self) -> tuple[str, ...]:
        found = (n for n in self._environ if SIGNS.fullmatch(n) and n not in self.used)
        return tuple(f"{name}={self._environ[name]}" for name in sorted(found) if self.has(name))


@dataclass(slots=True)
class Found:
    """What one launcher says.  nodes: the hosts' names, if it lists them, in its own order."""

    launcher: str
    rank: int = -1
    world_size: int = -1
    local_rank: int | None = None
    local_world_size: int | None = None
    nodes: tuple[str, ...] = ()
    on_first_node: bool | None = None
    job_id: str = ""
    root: tuple[str, str] = ("", "")  # variables that hold the root's host and port
    port_key: str = ""  # ports may be derived from it: equal on all ranks
    several_hosts: bool | None = None
    origins: dict[str, str] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)

    def read(self, variables: Variables, what: str, *names: str) -> int | None:
        """The first of `names` that is set, as a whole number, with its origin noted."""
        name, value = variables.text(*names)
        if not name:
            return None
        if not NUMBER.fullmatch(value):
            raise LaunchError(
                f"{name}={value!r}: expected a whole number, 0 or more; correct or unset it"
            )
        self.origins[what] = f"{name}={value}"
        return int(value)

    def need(self, variables: Variables, what: str, *names: str) -> int:
        value = self.read(variables, what, *names)
        if value is None:
            other = next(iter(self.origins.values()), self.launcher)
            raise LaunchError(
                f"{' or '.join(names)} is not set, though {other}: the {what.replace('_', ' ')} is "
                f"unknown; set {names[-1]}, or pass rank= and world_size="
            )
        return value

    def check_local(self) -> None:
        """Local values that contradict others are dropped: the agents find the true ones."""
        rank, size = self.local_rank, self.local_world_size
        world = self.origins.get("world_size", "")
        wrong = ""
        if size is not None and rank is not None and rank >= size:
            wrong = f"{self.origins['local_rank']} does not fit {self.origins['local_world_size']}"
        elif size is not None and not 1 <= size <= self.world_size:
            wrong = f"{self.origins['local_world_size']} does not fit {world}"
        elif rank is not None and rank >= self.world_size:
            wrong = f"{self.origins['local_rank']} does not fit {world}"
        if wrong:
            self.doubts.append(f"{wrong}: both are found out by comparing hosts instead")
            self.local_rank = self.local_world_size = None
            self.origins.pop("local_rank", None)
            self.origins.pop("local_world_size", None)
