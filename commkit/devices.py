"""The GPU that a rank binds: it must exist, and be nobody else's."""

from __future__ import annotations

from typing import Any

import torch

from commkit.environ import described
from commkit.errors import DigestMismatch, LaunchError
from commkit.overlay import World, native_errors

#: Seconds for the one question that is asked of the agents.
_PATIENCE = 60.0


def check_bound(device_id: torch.device | int | None) -> None:
    """Raises LaunchError if init_process_group's device_id is a CUDA device that is not visible."""
    index = _index(device_id)
    if index is None:
        return
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        sees = "none" if not count else "only cuda:0" if count == 1 else f"cuda:0 to {count - 1}"
        raise LaunchError(
            f"device_id={device_id!r}: this process sees {sees} "
            f"({described('CUDA_VISIBLE_DEVICES')}, {described('LOCAL_RANK')}); bind a visible one"
        )


def automatic(world: World, timeout: float) -> torch.device | None:
    """The GPU for this rank, whose script has named none: None on all ranks unless each has one.

    It is the current device if the script has chosen one, else that of the local rank.  One
    reduction over the tree, at most `timeout` seconds: NCCL makes the communicator at once where a
    device is bound, so all ranks bind one or none does.
    """
    index = _own(world.identity.local_rank)
    try:
        found = b"none" if index is None else b"one"
        world.agree(found, f"{found.decode()} of its own", tag="device", timeout=timeout)
    except DigestMismatch:
        return None
    return None if index is None else torch.device("cuda", index)


def _own(local_rank: int) -> int | None:
    count = torch.cuda.device_count()
    if count <= 1:
        return 0 if count else None
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if started and (current := torch.cuda.current_device()):
        return current
    return local_rank if local_rank < count else None


def claim(world: World, device_id: torch.device | int | None) -> bool:
    """Takes a CUDA device for this rank until the world ends; False if none is bound.

    Raises LaunchError if another rank has bound the same one, of whatever number: NCCL refuses two
    ranks on a device, but does not say which.
    """
    index = _index(device_id)
    if index is None:
        return False
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is None:
        return True
    me = world.identity.rank
    mine = f"{me} as cuda:{index} on host {world.spec.host.override or world.spec.host.hostname}"
    with native_errors():
        owner = world.keys.compare_set(
            f"device/{world.spec.host.key}/{uuid}".encode(), b"", mine.encode(), _PATIENCE
        ).decode()
    if owner != mine:
        raise LaunchError(
            f"rank {me} binds cuda:{index} (UUID {uuid}), which rank {owner} has bound already; "
            f"give each rank a device of its own, as torch.device('cuda', LOCAL_RANK) "
            f"({described('LOCAL_RANK')}, {described('CUDA_VISIBLE_DEVICES')})"
        )
    return True


def address() -> str:
    """PCI address of the CUDA device that this process uses, "" where it uses none so far."""
    cuda: Any = torch.cuda
    if not cuda.is_available() or not cuda.is_initialized():
        return ""
    found: Any = cuda.get_device_properties(cuda.current_device())
    if not hasattr(found, "pci_domain_id"):
        return ""  # an older torch
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _index(device_id: torch.device | int | None) -> int | None:
    if isinstance(device_id, int) and not isinstance(device_id, bool):
        return device_id if torch.cuda.is_available() else None
    if isinstance(device_id, torch.device) and device_id.type == "cuda":
        return device_id.index  # None is torch's own error
    return None
