"""What a container shows of its host: GPUs and shared memory.  No NVML, no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from commkit.errors import LaunchError

#: Shared memory that NCCL takes for one connection between two local ranks, bytes: about 10 MB
#: in logs that users of NCCL have published.
SHM_PER_CONNECTION = 10_000_000

_INDEX = re.compile(r"[0-9]{1,4}")
_UUID = re.compile(r"(GPU-[0-9a-fA-F-]+|MIG-(GPU-)?[0-9a-fA-F-]+(/[0-9]+/[0-9]+)?)")


def visible_devices(environ: Mapping[str, str] | None = None) -> list[str] | None:
    """CUDA_VISIBLE_DEVICES as the CUDA driver reads it: None (all devices) or a list of tokens.

    '' and NoDevFiles hide every device.  -1, and anything that is neither an index nor a UUID,
    ends the list: only what stands before it is visible.  UUIDs (GPU-..., MIG-..., abbreviated or
    not) are kept as they are; whether the device exists only CUDA can say.  Indices and UUIDs do
    not mix: the first one that differs in kind ends the list.  Source: CUDA C++ Programming Guide,
    "CUDA Environment Variables".

    Raises LaunchError for a device named twice, which CUDA answers by hiding all devices.
    """
    value = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    tokens: list[str] = []
    pattern: re.Pattern[str] | None = None
    for word in value.split(","):
        token = word.strip()
        kind = next((p for p in (_INDEX, _UUID) if p.fullmatch(token)), None)
        if kind is None or (pattern is not None and kind is not pattern):
            break
        pattern = kind
        if token in tokens:
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES={value!r}: expected each device once, but {token} stands "
                "there twice and CUDA then hides all of them; remove one"
            )
        tokens.append(token)
    return tokens


def require_device(backend: str, environ: Mapping[str, str] | None = None) -> None:
    """LaunchError if `backend` needs a GPU and CUDA_VISIBLE_DEVICES hides every one."""
    if "nccl" in backend and visible_devices(environ) == []:
        value = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES", "")
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU, but backend {backend!r} needs one; "
            "list a device, unset the variable, or use gloo"
        )


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """State of a shared memory file system, bytes; `leftover`: nccl-* files nobody has mapped."""

    path: str
    size: int
    free: int
    leftover: tuple[str, ...] = ()

    def doubt(self, local_ranks: int) -> str:
        """One line if `local_ranks` ranks will probably not fit, else ''.

        A ring gives each local rank one connection to its neighbour, about 10 MB.
        """
        need = local_ranks * SHM_PER_CONNECTION
        if local_ranks < 2 or self.free >= need:
            return ""
        line = (
            f"{self.path} has {self.free / 1e6:.0f} of {self.size / 1e6:.0f} MB free, but "
            f"{local_ranks} local ranks need about {need / 1e6:.0f} MB; start the container with "
            "--shm-size=8g (docker), or mount an emptyDir with medium: Memory there (Kubernetes)"
        )
        if self.leftover:
            line += f"; left by dead processes, remove if yours: {', '.join(self.leftover)}"
        return line


def shared_memory(path: str = "/dev/shm", proc: str = "/proc") -> SharedMemory | None:
    """Size, free space and abandoned nccl-* segments of `path`; None if there is no such thing."""
    try:
        stat = os.statvfs(path)
        names = sorted(name for name in os.listdir(path) if name.startswith("nccl-"))
    except OSError:
        return None
    return SharedMemory(
        path,
        stat.f_blocks * stat.f_frsize,
        stat.f_bavail * stat.f_frsize,
        _unmapped(path, names, proc) if names else (),
    )


def _unmapped(path: str, names: list[str], proc: str) -> tuple[str, ...]:
    """Those of `names` that no process has mapped; none if some process does not let us look."""
    left = {f"{path}/{name}" for name in names}
    for pid in os.listdir(proc):
        if not pid.isdigit():
            continue
        try:
            with open(f"{proc}/{pid}/maps", errors="replace") as stream:
                for line in stream:
                    left.discard(line.split(None, 5)[-1].rstrip("\n"))
        except FileNotFoundError:
            continue  # it ended meanwhile
        except OSError:
            return ()
    return tuple(sorted(left))
