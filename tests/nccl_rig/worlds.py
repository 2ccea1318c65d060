"""How a world starts: stock torch and commkit, lazily and with the device bound."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import rig_ranks as ranks
import torch.distributed as dist

import commkit

STARTS = ["stock", "stock bound", "commkit", "commkit bound"]


@contextlib.contextmanager
def begun(start: str, seconds: float = 60.0, **options: Any) -> Iterator[None]:
    """A world over NCCL; `bound` hands over the device, so that communicators are made at once."""
    kind, _, bound = start.partition(" ")
    device = ranks.device()
    if bound:
        options["device_id"] = device
    limit = timedelta(seconds=seconds)
    if kind == "commkit":
        commkit.init_process_group("nccl", timeout=limit, **options)
    else:
        dist.init_process_group("nccl", timeout=limit, **options)
    yield
    if dist.is_initialized():
        if kind == "stock":
            dist.barrier()  # the store ends with rank 0
        end = commkit.destroy_process_group if kind == "commkit" else dist.destroy_process_group
        end()
