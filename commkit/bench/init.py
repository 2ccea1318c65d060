"""commkit bench init: how long a start takes, phase by phase, beside stock torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commkit import api, groups
from commkit import layout as layouts
from commkit.bench import device as devices
from commkit.bench.placement import Place
from commkit.bench.watch import Watch
from commkit.bench.worlds import stock_rendezvous
from commkit.errors import EXIT_OK
from commkit.measure.torch_backend import TorchBackend

_LIMIT = 600.0


@dataclass(frozen=True, slots=True)
class Options:
    cycles: int
    layout: str  # "" makes no groups
    backend: str
    stock: bool  # stock torch alone
    timeout: float | None


#: way -> phase -> (seconds of the slowest rank, that rank) of each cycle
Cycles = dict[str, dict[str, list[tuple[float, int]]]]


def run(options: Options, place: Place) -> int:
    """Starts and ends a world `cycles` times each way; rank 0 prints.  The exit code."""
    backend, device = devices.choose(options.backend, place)
    devices.share_cores(place.spec.local_world_size or 1)
    found: Cycles = {}
    ways = ["torch"] if options.stock else ["commkit", "torch"]
    # Outside, a port of the launcher's has one owner: the agents' root or torch's store.
    if not place.forked and place.world_size > 1 and place.spec.root.kind != "elastic":
        ways = ways[:1]
    with Watch(f"rank {place.rank} of {place.world_size}") as watch:
        for cycle in range(options.cycles):
            for way in ways:
                watch.allow(options.timeout or _LIMIT)
                watch.phase(f"cycle {cycle + 1}, {way}")
                mine = _cycle(options, _renamed(place, f"{way}-{cycle}"), way, backend, device)
                for phase, (seconds, rank) in mine.items():
                    found.setdefault(way, {}).setdefault(phase, []).append((seconds, rank))
    if place.rank == 0:
        print("\n".join(lines(found, options, place.world_size, backend)), flush=True)
    return EXIT_OK


def _renamed(place: Place, suffix: str) -> Place:
    """A rendezvous file is good for one world."""
    if place.init_method is None or not place.init_method.startswith("file://"):
        return place
    return replace(place, init_method=f"{place.init_method}-{suffix}")


def _cycle(
    options: Options, place: Place, way: str, backend: str, device: torch.device
) -> dict[str, tuple[float, int]]:
    """One start and end: phase -> (seconds of the slowest rank, that rank)."""
    took: dict[str, float] = {}
    lap = _lap(took)
    _start(way, place, backend, device)
    if way == "commkit":
        took.update(api.start_up_phases())
    lap("init_process_group")
    dist.all_reduce(torch.zeros(1, device=device))
    lap("first all_reduce")
    if options.layout:
        (_groups_of_commkit if way == "commkit" else _groups_of_torch)(
            options.layout, place.world_size
        )
        lap("groups")
    took["all"] = sum(
        took[name] for name in ("init_process_group", "first all_reduce", "groups") if name in took
    )
    world = TorchBackend(backend, device)
    rows = world.gather(list(took.values()))
    slowest = {
        phase: max((row[at], rank) for rank, row in enumerate(rows))
        for at, phase in enumerate(took)
    }
    world.barrier()
    (api if way == "commkit" else dist).destroy_process_group()
    return slowest


def _lap(took: dict[str, float]) -> Callable[[str], None]:
    since = [time.monotonic()]

    def lap(name: str) -> None:
        now = time.monotonic()
        took[name], since[0] = now - since[0], now

    return lap


def _start(way: str, place: Place, backend: str, device: torch.device) -> None:
    arguments: dict[str, Any] = {"backend": backend, "timeout": timedelta(seconds=_LIMIT)}
    if device.type == "cuda":
        arguments["device_id"] = device
    if place.init_method is not None:
        arguments.update(
            init_method=place.init_method, rank=place.rank, world_size=place.world_size
        )
    elif way == "torch":
        arguments.update(stock_rendezvous(place))
    (api if way == "commkit" else dist).init_process_group(**arguments)


def _groups_of_commkit(layout: str, world_size: int) -> None:
    groups.new_groups(layout)


def _groups_of_torch(layout: str, world_size: int) -> None:
    """As scripts do it: every rank calls new_group for every group."""
    for family in layouts.parse(layout, world_size).families.values():
        for ranks in family:
            dist.new_group(list(ranks))


def lines(found: Cycles, options: Options, world_size: int, backend: str) -> list[str]:
    """A table: medians over the cycles of the slowest rank's seconds, in ms."""
    ways = list(found)
    text = [
        f"# start-up of {world_size} ranks, backend {backend}, medians of {options.cycles} cycles "
        "of the slowest rank",
        f"# {'phase (ms)':<22}" + "".join(f"{way:>12}{'rank':>6}" for way in ways),
    ]
    phases = list(dict.fromkeys(phase for way in ways for phase in found[way]))
    phases = [phase for phase in phases if phase != "all"] + ["all"]
    for phase in phases:
        row = f"  {phase:<22}"
        for way in ways:
            values = found[way].get(phase)
            if values is None:
                row += f"{'-':>12}{'':>6}"
                continue
            rank = statistics.mode(rank for _, rank in values)
            row += f"{statistics.median(seconds for seconds, _ in values) * 1e3:12.2f}{rank:6d}"
        text.append(row)
    return text
