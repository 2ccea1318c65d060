"""A world of ranks for each back end: how it starts, what is measured in it, how it ends."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from commkit import api, groups
from commkit.bench.placement import Place
from commkit.errors import LaunchError
from commkit.measure.backend import Backend
from commkit.measure.torch_backend import FakeBackend, TorchBackend

MakeBackend = Callable[..., Backend]
Groups = tuple[tuple[int, ...], ...]

#: Back ends that are not torch's: what they need, and the line that installs it.
NEEDS = {
    "mpi": ("mpi4py", "pip install mpich mpi4py (or mpi4py alone over the system's MPI)"),
    "cupy": ("cupy", "pip install cupy-cuda12x (cupy-cuda13x for CUDA 13)"),
}


@dataclass(frozen=True, slots=True)
class World:
    """`control` carries the ranks' talk, `measured` the collectives; often they are one.

    `make_group` is called by every rank of the world with the same label and groups.
    """

    control: Backend
    measured: Backend
    make_group: Callable[[str, Groups], Backend | None]
    phases: dict[str, float]
    close: Callable[[], None]
    store: Any = None


def require(backend: str) -> None:
    """Raises LaunchError with the line that installs what is missing."""
    module, line = NEEDS.get(backend, ("", ""))
    if not module:
        return
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise LaunchError(
            f"--backend {backend}: no usable {module} ({' '.join(str(error).split())}); {line}"
        ) from error


def open_world(
    backend: str,
    device: torch.device,
    place: Place,
    *,
    stock: bool,
    seconds: float,
    make_backend: MakeBackend,
) -> World:
    """Joins; `seconds` is the deadline.  Raises what init_process_group raises, LaunchError."""
    if backend == "mpi":
        return _mpi()
    if backend == "fake":
        return _fake(place)
    carrier = "gloo" if backend == "cupy" else backend
    _init(stock, place, carrier, device, seconds)
    phases = {} if stock else api.start_up_phases()
    close = dist.destroy_process_group if stock else api.destroy_process_group
    store = dist.distributed_c10d._get_default_store()
    if backend == "cupy":
        return _cupy(device, phases, close, store)
    control = make_backend(backend, device)

    def make_group(label: str, wanted: Groups) -> Backend | None:
        mine = torch_group(label, wanted)
        return None if mine is None else make_backend(backend, device, mine)

    return World(control, control, make_group, phases, close, store)


def torch_group(label: str, wanted: Groups) -> Any:
    """This rank's process group of a family; None if it is in none."""
    made = groups.new_groups({f"bench-{label}": [list(ranks) for ranks in wanted]})
    return made.get(f"bench-{label}")


def _fake(place: Place) -> World:
    store: Any = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    dist.init_process_group("fake", rank=0, world_size=place.world_size, store=store)
    device = torch.device("cpu")
    control = FakeBackend("fake", device)

    def make_group(label: str, wanted: Groups) -> Backend | None:
        ranks = next((list(ranks) for ranks in wanted if 0 in ranks), None)
        if ranks is None:
            return None
        return FakeBackend("fake", device, dist.new_group(ranks))

    return World(control, control, make_group, {}, dist.destroy_process_group)


def _mpi() -> World:
    require("mpi")
    from commkit.measure.mpi import MpiBackend

    control = MpiBackend()

    def make_group(label: str, wanted: Groups) -> Backend | None:
        return control.group(_color(wanted, control.rank))

    return World(control, control, make_group, {}, lambda: None)


def _color(wanted: Sequence[Sequence[int]], rank: int) -> int | None:
    return next((at for at, ranks in enumerate(wanted) if rank in ranks), None)


def _cupy(
    device: torch.device, phases: dict[str, float], close: Callable[[], None], store: Any
) -> World:
    require("cupy")
    from commkit.measure.cupy_nccl import CupyBackend

    control = TorchBackend("gloo", torch.device("cpu"))
    measured = CupyBackend(control, device)

    def make_group(label: str, wanted: Groups) -> Backend | None:
        mine = torch_group(label, wanted)
        if mine is None:
            return None
        return CupyBackend(TorchBackend("gloo", torch.device("cpu"), mine), device)

    return World(
        control, measured, make_group, {**phases, "communicator": measured.created}, close, store
    )


def _init(stock: bool, place: Place, backend: str, device: torch.device, seconds: float) -> None:
    arguments: dict[str, Any] = {"backend": backend, "timeout": timedelta(seconds=seconds)}
    if device.type == "cuda" and backend != "gloo":
        arguments["device_id"] = device
    if place.init_method is not None:
        arguments.update(
            init_method=place.init_method, rank=place.rank, world_size=place.world_size
        )
    if not stock:
        api.init_process_group(**arguments)
        return
    if place.init_method is None:
        arguments.update(stock_rendezvous(place))
    dist.init_process_group(**arguments)


def stock_rendezvous(place: Place) -> dict[str, Any]:
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
