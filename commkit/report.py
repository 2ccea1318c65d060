"""What each phase of a start-up took on the slowest, the median and the fastest rank.

Every rank gives its own seconds by phase; one gather over the tree brings them to rank 0.  Where a
rank is lost, or does not come, rank 0 reads what the others have noted with their agents.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as torch_c10d
from torch._C._distributed_c10d import ProcessGroup

from commkit import _C, creation, groups, nccl_log
from commkit.errors import CommkitError, LaunchError
from commkit.making import Creation
from commkit.overlay import World
from commkit.ranks import runs
from commkit.version import VERSION

log = logging.getLogger("commkit")

#: Seconds that rank 0 waits at the end of a world for ranks that have not given their part.
PATIENCE = 10.0

#: The same where a rank is lost: the others end as well, but each at its own time.
_PATIENCE_AFTER_LOSS = 3.0
_AGAIN = 0.25

_KEY = "report"

#: Much of it is torch's own business and not declared.
c10d: Any = torch_c10d

Report = dict[str, Any]


def check_path(path: str) -> None:
    """Raises LaunchError if no file can be written at `path`: now, not at the job's end."""
    place = Path(path).parent
    if Path(path).is_dir() or not os.access(place, os.W_OK):
        why = "is a directory" if Path(path).is_dir() else f"{place} is not a directory to write to"
        raise LaunchError(
            f"COMMKIT_REPORT={path!r}: {why} on rank 0's host; expected the path of a file; "
            "correct or unset it"
        )


def start(
    world: World, start_up: Mapping[str, float], first_use: bool, timeout: float
) -> Report | None:
    """The report at rank 0, None elsewhere; every rank calls it.  `timeout` is in seconds."""
    if first_use:
        groups.used(_use_each())
    parts = world.gather(_part(world, start_up), 0, tag=_KEY, timeout=timeout)
    return None if parts is None else _summary(world, dict(enumerate(parts)), "")


def leave(world: World, start_up: Mapping[str, float], path: str) -> None:
    """This rank's part at the end of a world; rank 0 waits for the others and writes `path`.

    It waits PATIENCE seconds at most, and says which ranks are missing.  Never raises.
    """
    part = _part(world, start_up)
    me = world.identity.rank
    parts, why = {me: part}, ""
    try:
        world.note(_key(me), part)
        gathered = world.gather(part, 0, tag=f"{_KEY}/leave", timeout=PATIENCE)
        if gathered is not None:
            parts = dict(enumerate(gathered))
    except CommkitError as error:
        why = str(error)
        if me == 0:
            lost = bool(world.failures())
            parts.update(_noted(world, _PATIENCE_AFTER_LOSS if lost else 0.0))
    if me == 0:
        try:
            _write(path, _summary(world, parts, why))
        except OSError as error:
            log.warning("COMMKIT_REPORT=%r: not written: %s", path, error.strerror)


def _part(world: World, start_up: Mapping[str, float]) -> bytes:
    host = world.spec.host.override or world.spec.host.hostname
    return json.dumps({"host": host, "phases": phases(start_up)}).encode()


def phases(start_up: Mapping[str, float]) -> dict[str, float]:
    """This rank's seconds by phase, in the order of the report.

    A family's creation is the sum over its groups on this rank; where several are made at once the
    sum over families exceeds `groups`.
    """
    of_groups, created = groups.timings()
    result = {name: seconds for name, seconds in start_up.items() if name != "groups"}
    result.update((name, of_groups[name]) for name in ("digest", "groups") if name in of_groups)
    for one in created:
        name = f"create/{one.family}" if one.family else "create"
        result[name] = result.get(name, 0.0) + one.seconds
    result.update((k, v) for k, v in of_groups.items() if k not in result)
    result.update(_of_nccl(created))
    return result


def _of_nccl(created: Sequence[Creation]) -> dict[str, float]:
    """What NCCL itself says of the communicators of these groups, where its log can be read."""
    timings = nccl_log.of_this_process()
    if not timings or not dist.is_initialized():
        return {}
    made = [("default", dist.get_rank(), dist.get_world_size())]
    for one in created:
        group = one.group()
        if group is not None and group in c10d._world.pg_map:
            made.append((one.family or "unnamed", group.rank(), one.size))
    return {
        f"nccl/{family}/{part}": seconds
        for family, timing in nccl_log.by_family(timings, made).items()
        for part, seconds in {"total": timing.total, **timing.parts}.items()
    }


def _use_each() -> dict[str, float]:
    """Runs one small all_reduce on each group that this rank has made, in the order of making."""
    took: dict[str, float] = {}
    for one in groups.timings()[1]:
        group = one.group()
        if group is None or one.size == 1 or group not in c10d._world.pg_map:
            continue
        value = torch.ones(1, device=_device(group))
        began = time.monotonic()
        dist.all_reduce(value, group=group)
        value.item()  # on a GPU the call returns before it is done
        name = f"first_use/{one.family}" if one.family else "first_use"
        took[name] = took.get(name, 0.0) + time.monotonic() - began
    return took


def _device(group: ProcessGroup) -> torch.device:
    if group.bound_device_id is not None:
        return group.bound_device_id
    kinds = creation.backends(c10d._world.pg_backend_config[group])
    kind = "cpu" if kinds.get("cpu") else next(iter(kinds))
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _key(rank: int) -> bytes:
    return f"commkit:{rank}/{_KEY}".encode()


def _noted(world: World, patience: float) -> dict[int, bytes]:
    """What ranks have noted: read until all have, or for `patience` seconds, once at least."""
    found: dict[int, bytes] = {}
    deadline = time.monotonic() + patience
    with contextlib.suppress(_C.Failure):
        while len(found) < world.identity.world_size:
            there = set(world.keys.list_keys(PATIENCE))
            fresh = [
                rank
                for rank in range(world.identity.world_size)
                if rank not in found and _key(rank) in there
            ]
            if fresh:
                values = world.keys.get([_key(rank) for rank in fresh], PATIENCE)
                found.update(zip(fresh, values, strict=True))
            if time.monotonic() >= deadline:
                break
            time.sleep(_AGAIN)
    return found


def _summary(world: World, parts: Mapping[int, bytes], why: str) -> Report:
    told = {rank: json.loads(part) for rank, part in sorted(parts.items())}
    size = world.identity.world_size
    report: Report = {
        "commkit": VERSION,
        "torch": torch.__version__,
        "epoch": world.identity.epoch,
        "world_size": size,
        "hosts": world.identity.hosts,
        "missing": runs([rank for rank in range(size) if rank not in told]),
        "why": why,
        "phases": {},
    }
    names: dict[str, None] = {}
    for part in told.values():
        names.update(dict.fromkeys(part["phases"]))
    for name in names:
        taken = sorted(
            (part["phases"][name], rank) for rank, part in told.items() if name in part["phases"]
        )
        report["phases"][name] = {"ranks": len(taken), **_places(taken, told)}
    return report


def _places(taken: Sequence[tuple[float, int]], told: Mapping[int, Any]) -> dict[str, Any]:
    places = {"slowest": -1, "median": (len(taken) - 1) // 2, "fastest": 0}
    return {
        name: {
            "seconds": round(taken[at][0], 6),
            "rank": taken[at][1],
            "host": told[taken[at][1]]["host"],
        }
        for name, at in places.items()
    }


def _write(path: str, report: Report) -> None:
    # A reader sees the old file or the new one.
    beside = Path(f"{path}.{os.getpid()}.new")
    try:
        beside.write_text(json.dumps(report, indent=1) + "\n")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
