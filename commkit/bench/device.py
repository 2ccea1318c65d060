"""Back end, device and free memory of one rank.  Nothing here runs before a fork."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from commkit.bench.placement import Place
from commkit.errors import LaunchError


def choose(backend: str, place: Place) -> tuple[str, torch.device]:
    """`auto` is nccl where every local rank has a GPU, else gloo.

    Raises LaunchError if the back end needs a GPU and there is none for this local rank.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local_size = place.spec.local_world_size or 1
    # One visible GPU under a launcher: it gave each rank its own.
    isolated = gpus == 1 and not place.forked
    if backend == "auto":
        usable = gpus > 0 and (isolated or gpus >= local_size) and dist.is_nccl_available()
        backend = "nccl" if usable else "gloo"
    if "nccl" not in backend and backend != "cupy":
        return backend, torch.device("cpu")
    local_rank = place.spec.local_rank
    # Without a local rank: ranks are placed host by host, which is every launcher's default.
    index = place.rank % max(gpus, 1) if local_rank is None else local_rank
    index = 0 if isolated else index
    if index >= gpus:
        raise LaunchError(
            f"--backend {backend}: local rank {index} has no GPU: {gpus} visible; start at most "
            "one rank a GPU, or use --backend gloo"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return backend, device


def share_cores(ranks: int) -> None:
    """One host's ranks divide its cores, unless OMP_NUM_THREADS says how."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def free_memory(device: torch.device, local_ranks: int) -> int:
    """Bytes that this rank may allocate: the GPU's, or its share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_memory() // max(1, local_ranks)


def host_memory(root: Path = Path("/")) -> int:
    """Bytes available to this process: the kernel's estimate or the rest of its cgroup."""
    available = 1 << 62
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            available = int(value.split()[0]) << 10
    group = _text(root / "proc/self/cgroup").rpartition("::")[2].strip().lstrip("/")
    for path in (root / "sys/fs/cgroup" / group, root / "sys/fs/cgroup"):
        limit, used = _text(path / "memory.max").strip(), _text(path / "memory.current").strip()
        if limit.isdecimal() and used.isdecimal():
            # Page cache counts as used but is given back: without it, what is free is unknown.
            cached = sum(
                int(line.split()[1])
                for line in _text(path / "memory.stat").splitlines()
                if line.startswith(("inactive_file ", "active_file "))
            )
            available = min(available, max(0, int(limit) - int(used) + cached))
    return available


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
