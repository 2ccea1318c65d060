"""torch's own stores at the root's endpoint, while a world exists.

torch.distributed.rpc, and whatever else asks torch for a rendezvous at MASTER_ADDR and MASTER_PORT,
gets a TCPStore of torch there: on stock torch the server of the default group, which all of a
process share.  With commkit the root's agent listens at that port.  The server is then made at a
port that the kernel chooses, and the ranks learn it from the tree: it is torch's alone, and stays
when the default group ends.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from commkit.errors import JoinTimeout, OverlayTimeout
from commkit.overlay import World, native_errors

#: The server that this process has made in its world.
_served: Any = None
#: A parent's, in a forked child: it would end by waiting for a thread that the child does not have.
_inherited: list[Any] = []


def observe(world: Callable[[], World | None]) -> None:
    """From now on stores of torch give way to the root of `world()`; twice changes nothing."""
    # torch.distributed has a function of that name.
    torch_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    create = getattr(torch_rendezvous, "_create_c10d_store", None)
    if create is None or hasattr(create, "_commkit"):
        return  # without it RPC has to be given a port of its own

    @functools.wraps(create)
    def beside_root(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *rest: Any
    ) -> Any:
        here = world()
        if here is None or here.spec.root.kind != "endpoint" or port not in here.spec.root.ports:
            return create(hostname, port, rank, world_size, timeout, *rest)
        return _store(create, here, hostname, port, rank, world_size, timeout, *rest)

    beside_root._commkit = True  # type: ignore[attr-defined]
    torch_rendezvous._create_c10d_store = beside_root


def forget() -> None:
    """The world has ended; who uses its server keeps it."""
    global _served
    _served = None


def _leave_to_parent() -> None:
    _inherited.append(_served)
    forget()


os.register_at_fork(after_in_child=_leave_to_parent)


def _store(
    create: Any,
    world: World,
    hostname: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: timedelta,
    *rest: Any,
) -> Any:
    global _served
    key = f"commkit/rendezvous/{port}".encode()
    seconds = timeout.total_seconds()
    if rank == 0:
        if _served is None:
            # Not by `create`: that returns when the others have come, who do not know the port yet.
            _served = TCPStore(
                hostname,
                0,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=True,
                use_libuv=bool(rest[0]) if rest else True,
            )
            with native_errors():
                world.keys.set(key, str(_served.port).encode(), seconds)
        # torch lets all users of a process share the server of a port.
        return create(hostname, _served.port, rank, world_size, timeout, *rest)
    try:
        with native_errors(), world.creating():
            found = int(world.keys.get([key], seconds)[0])
    except OverlayTimeout as error:
        raise JoinTimeout(
            f"rank {rank}: rank 0 of {world_size} made no store for {hostname}:{port} within "
            f"{seconds:g} s; is it in the same call (init_rpc, rendezvous)?"
        ) from error
    return create(hostname, found, rank, world_size, timeout, *rest)
