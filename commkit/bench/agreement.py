"""What ranks tell one another before anything is measured, and what they must agree on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from commkit import launch, records
from commkit.bench import device as devices
from commkit.bench.placement import Place
from commkit.errors import CommkitError, UsageError
from commkit.measure.backend import Backend
from commkit.version import VERSION


@dataclass(frozen=True, slots=True)
class Hello:
    """One rank's own."""

    host: str
    hostname: str
    pid: int
    device: str
    index: int | None  # of the GPU on its host
    local_rank: int | None
    free: int
    plan: str
    versions: dict[str, str]
    environment: dict[str, str]
    trouble: str = ""

    def place(self) -> str:
        return self.device if self.index is None else f"{self.index:2d} {self.device}"

    def dump(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


def open_records(backend: Backend, path: str) -> tuple[records.Writer | None, str]:
    """Rank 0's writer of --json, or the trouble that its hello tells of; elsewhere neither."""
    if backend.rank != 0 or not path:
        return None, ""
    try:
        return records.Writer(path), ""
    except UsageError as error:
        return None, str(error)


def hello(place: Place | None, backend: Backend, plan: str, trouble: str) -> Hello:
    host = place.spec.host if place is not None else launch.host_identity()
    return Hello(
        host=host.key,
        hostname=host.hostname,
        pid=os.getpid(),
        device=devices.name(backend.device),
        index=backend.device.index,
        local_rank=None if place is None else place.spec.local_rank,
        free=devices.free_memory(backend.device, 1),
        plan=plan,
        versions=versions(backend),
        environment=records.kept_environment(os.environ),
        trouble=trouble,
    )


def exchange(backend: Backend, mine: Hello) -> list[Hello]:
    """Every rank's, in rank order.

    Raises UsageError on rank 0, SystemExit with its code elsewhere, if rank 0 is in trouble or a
    rank was started with another plan.
    """
    hellos = [Hello(**json.loads(text)) for text in backend.gather_text(mine.dump())]
    first = hellos[0]
    if first.trouble:
        refuse(backend, UsageError(first.trouble))
    for rank, other in enumerate(hellos):
        if other.plan != first.plan:
            refuse(
                backend,
                UsageError(
                    f"rank {rank} ({other.hostname}) was started with other arguments than "
                    "rank 0; give every rank the same command line"
                ),
            )
    return hellos


def refuse(backend: Backend, error: CommkitError) -> NoReturn:
    """End every rank alike; one of them says why."""
    if backend.rank == 0:
        raise error
    raise SystemExit(error.exit_code)


def differences(hellos: Sequence[Hello]) -> list[str]:
    """Library versions and settings in which a rank differs from rank 0: the first of each."""
    lines: dict[str, str] = {}
    first = hellos[0]
    for rank, other in enumerate(hellos):
        for ours, theirs in (
            (first.versions, other.versions),
            (first.environment, other.environment),
        ):
            for name in sorted(ours.keys() | theirs.keys()):
                a, b = ours.get(name, "unset"), theirs.get(name, "unset")
                own = name.endswith(("_VISIBLE_DEVICES", "_HOST_ID"))
                if a != b and name not in lines and not own:
                    lines[name] = f"# warning: {name} is {a} on rank 0, {b} on rank {rank}"
    return list(lines.values())


def versions(backend: Any) -> dict[str, str]:
    found = {
        "commkit": VERSION,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }
    if backend.device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        nccl: Any = torch.cuda.nccl  # torch leaves it untyped
        found["nccl"] = ".".join(str(part) for part in nccl.version())
    found.update(getattr(backend, "versions", {}))
    return found
