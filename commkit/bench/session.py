"""One rank of a bench: join the world, sweep, report, leave."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from commkit import api
from commkit.bench import device as devices
from commkit.bench.arguments import Arguments
from commkit.bench.placement import Place
from commkit.bench.sweep import Sweep
from commkit.bench.watch import Watch
from commkit.errors import CommkitError, LaunchError, OverlayTimeout, RankDied
from commkit.measure.backend import TorchBackend
from commkit.measure.collectives import Collective

#: Seconds for all ranks to join, and for the first collective, which loads kernels and connects.
START_UP = 600.0
_FIRST = 300.0
_LEAVING = 60.0
#: Agents report a death within two seconds; connections break at once.
_REPORT_DELAY = 2.0


def run(
    arguments: Arguments,
    row: Collective,
    place: Place,
    *,
    make_backend: type[TorchBackend] = TorchBackend,
) -> int:
    """The exit code of this rank.

    Raises UsageError, LaunchError and what init_process_group raises; RankDied or OverlayTimeout
    if a peer was lost during the sweep.  A deadline or an interrupt that finds the rank in native
    code ends the process with 124 or 130.
    """
    backend_name, device = devices.choose(arguments.backend, place)
    devices.share_cores(place.spec.local_world_size or 1)
    with Watch(f"rank {place.rank} of {place.world_size}") as watch:
        # --timeout is for one size; starting is not to fail because a size must be quick.
        join = START_UP if arguments.timeout is None else max(arguments.timeout, _LEAVING)
        # init_process_group has the same deadline and knows who is missing: let it speak first.
        watch.allow(join + 15)
        began = time.monotonic()
        _init(arguments.stock, place, backend_name, device, join)
        took = time.monotonic() - began
        phases = {} if arguments.stock else api.start_up_phases()
        watch.allow(min(join, _FIRST))
        watch.phase("first collective")
        backend = make_backend(backend_name, device)
        with _lost_peers(watch, arguments.stock):
            code = Sweep(arguments, row, place, backend, watch).run(took, phases)
            watch.allow(_LEAVING)
            watch.phase("leaving")
            watch.deferring = False
            # Nobody leaves while another rank still needs it for a last collective.
            backend.barrier()
        (dist if arguments.stock else api).destroy_process_group()
        return code


def _init(stock: bool, place: Place, backend: str, device: torch.device, seconds: float) -> None:
    arguments: dict[str, Any] = {"backend": backend, "timeout": timedelta(seconds=seconds)}
    if device.type == "cuda":
        arguments["device_id"] = device
    if place.init_method is not None:
        arguments.update(
            init_method=place.init_method, rank=place.rank, world_size=place.world_size
        )
    if not stock:
        api.init_process_group(**arguments)
        return
    if place.init_method is None:
        arguments.update(_stock_rendezvous(place))
    dist.init_process_group(**arguments)


def _stock_rendezvous(place: Place) -> dict[str, Any]:
    """What torch needs besides the back end; it reads only its own launcher's variables."""
    world = {"rank": place.rank, "world_size": place.world_size}
    root = place.spec.root
    if place.world_size == 1:
        return {"store": HashStore(), **world}
    if root.kind == "elastic":
        return {"init_method": "env://"}
    if root.kind == "endpoint" and len(root.ports) == 1:
        host = f"[{root.host}]" if ":" in root.host else root.host
        return {"init_method": f"tcp://{host}:{root.ports[0]}", **world}
    raise LaunchError(
        f"--stock under {place.spec.launcher}: torch by itself needs MASTER_ADDR and MASTER_PORT; "
        "set both to an address and a free port of rank 0's host"
    )


@contextlib.contextmanager
def _lost_peers(watch: Watch, stock: bool) -> Iterator[None]:
    """Back ends report a lost peer as a RuntimeError about a socket; say what it means."""
    try:
        yield
    except CommkitError:
        raise
    except RuntimeError as error:
        text = _first_sentence(error)
        if watch.late():
            raise OverlayTimeout(
                f"{watch.describe()}: a peer gave up at its deadline: {text}"
            ) from error
        report = [] if stock else _dead()
        cause = "; ".join(report) or "a peer has gone, or the library failed"
        raise RankDied(f"{watch.describe()}: {cause}: {text}") from error


def _first_sentence(error: BaseException) -> str:
    """Without the source location that torch puts before it and the advice that it puts after."""
    text = re.sub(r"^(\[\S+:\d+\]\s*)+", "", str(error).partition("\n")[0])
    return text.partition(". ")[0]


def _dead() -> list[str]:
    until = time.monotonic() + _REPORT_DELAY
    world = api.world()
    while world is not None:
        report = world.failures()
        if report or time.monotonic() > until:
            return report
        time.sleep(0.05)
    return []
