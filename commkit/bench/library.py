"""A sweep as a library call, inside a job whose process group exists."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist

from commkit import api, groups
from commkit.bench import arguments
from commkit.bench.sweep import Sweep
from commkit.bench.watch import Watch
from commkit.bench.worlds import torch_group
from commkit.errors import EXIT_WRONG_DATA, CommkitError, UsageError, WrongData
from commkit.measure.torch_backend import TorchBackend
from commkit.records import Measurement


def run(
    collective: str | tuple[str, ...] = "all_reduce",
    *,
    group: Any = None,
    quiet: bool = True,
    **flags: Any,
) -> list[Measurement]:
    """Measures in the running job; every rank of `group` calls it and gets the same records.

    `group` is a process group, the name of a family that commkit.new_groups made, or None for all
    ranks; a rank that is not in it gets [].  `flags` are those of the command line by their long
    names (arguments.plan): minbytes="8", maxbytes="1M", stepfactor=2, iters, datatype, precision,
    json, ...  Unless `quiet` rank 0 prints the table.

    Raises WrongData, naming rank and element, on every rank if one received wrong data;
    CommkitError if a size is below min_busbw; UsageError for a wrong flag or without a group.
    Deadlines are the process group's own.
    """
    if not dist.is_initialized():
        raise UsageError("bench.run: there is no process group; call init_process_group first")
    plan = arguments.plan(collective=collective, **flags)
    chosen = groups.get_group(group) if isinstance(group, str) else group
    if chosen is groups.NON_MEMBER or (chosen is not None and dist.get_rank(chosen) < 0):
        return []
    backend = dist.get_backend(chosen)
    cuda = "nccl" in str(backend)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    def make_group(label: str, wanted: tuple[tuple[int, ...], ...]) -> TorchBackend | None:
        if chosen is not None:
            raise UsageError("bench.run: give group, or a layout and its family, not both")
        mine = torch_group(label, wanted)
        return None if mine is None else TorchBackend(str(backend), device, mine)

    world = TorchBackend(str(backend), device, chosen)
    # Not entered: no thread ends this process, no signal is caught.
    watch = Watch(f"rank {world.rank} of {world.world_size}")
    plan_of_start = api.is_initialized()
    sweep = Sweep(plan, None, world, watch, make_group, stock=not plan_of_start)
    if quiet:
        sweep.print_to(io.StringIO())
    try:
        code = sweep.run(0.0, {})
    except SystemExit as error:
        raise UsageError("bench.run: refused; rank 0 says why") from error
    if code == EXIT_WRONG_DATA:
        raise WrongData(sweep.first_wrong())
    if code:
        raise CommkitError("; ".join(sweep.short) or f"bench.run: ended with {code}")
    return sweep.records
