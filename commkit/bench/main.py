"""From checked arguments to an exit code: the launcher's world, or local ranks, or one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from commkit import launch, settings
from commkit.bench import placement
from commkit.bench.arguments import Arguments
from commkit.bench.placement import Place
from commkit.errors import UsageError


def run(arguments: Arguments, *, default_nproc: int = 0, debug: bool = False) -> int:
    """Measure what `arguments` say; the exit code is the same on every rank.

    `default_nproc` ranks are started here if no launcher has started any.  Raises UsageError and
    LaunchError before any group is made, and what session.run raises.
    """
    if settings.load().disable:  # then torch starts the group, and records are to say so
        arguments = replace(arguments, stock=True)
    nproc = arguments.nproc
    place = placement.from_environment(nproc)
    if place.world_size == 1 and not nproc:
        nproc = default_nproc
    if (nproc or place.world_size) == 1 and arguments.gates:
        raise UsageError("--min-busbw: bus bandwidth is not defined for one rank; start more")
    if arguments.backend == "mpi" and nproc > 1:
        raise UsageError(
            f"--nproc {nproc} --backend mpi: MPI starts its ranks itself: "
            f"mpiexec -n {nproc} commkit bench ... --backend mpi"
        )
    # torch is imported only now: mistakes above cost no seconds, and before the fork: once.
    from commkit.bench import session

    if arguments.backend == "fake":
        spec = replace(place.spec, rank=0, world_size=nproc or place.world_size)
        return session.run(arguments, Place(spec))
    if not nproc:
        return session.run(arguments, place)
    return local(nproc, lambda mine: session.run(arguments, mine), debug=debug)


def local(nproc: int, body: Callable[[Place], int], *, debug: bool = False) -> int:
    """Forks `nproc` ranks that meet through a file; the code that sums them up."""
    from commkit.bench import launch_local

    def rank(member: launch_local.Member) -> int:
        spec = launch.resolve(
            init_method=member.init_method, rank=member.rank, world_size=member.world_size
        )
        spec = replace(spec, local_rank=member.rank, local_world_size=member.world_size)
        return body(Place(spec, init_method=member.init_method, forked=True))

    return launch_local.run(nproc, rank, debug=debug)
