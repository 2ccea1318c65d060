"""From checked arguments to an exit code: the launcher's world, or local ranks, or one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from commkit import launch, settings
from commkit.bench import dryrun, formats, placement
from commkit.bench.arguments import Arguments
from commkit.bench.placement import Place
from commkit.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from commkit.bench.init import Options


def run(
    arguments: Arguments,
    *,
    pairs: str = "",
    default_nproc: int = 0,
    dry_run: bool = False,
    debug: bool = False,
) -> int:
    """Measure what `arguments` say; the exit code is the same on every rank.

    `pairs` asks for the matrix of pairs instead of a sweep; `default_nproc` ranks are started here
    if no launcher has started any; a dry run prints the plan.  Raises UsageError and LaunchError
    before any group is made, and what session.run raises.
    """
    if settings.load().disable:  # then torch starts the group, and records are to say so
        arguments = replace(arguments, stock=True)
    nproc = arguments.nproc
    place = placement.from_environment(nproc)
    if place.world_size == 1 and not nproc:
        nproc = default_nproc
    size = nproc or place.world_size
    if dry_run:
        if place.rank == 0:
            print("\n".join(dryrun.lines(arguments, size)), flush=True)
        return EXIT_OK
    if size == 1 and arguments.gates:
        raise UsageError("--min-busbw: bus bandwidth is not defined for one rank; start more")
    if arguments.backend == "mpi" and nproc > 1:
        raise UsageError(
            f"--nproc {nproc} --backend mpi: MPI starts its ranks itself: "
            f"mpiexec -n {nproc} commkit bench ... --backend mpi"
        )
    if arguments.baseline and place.rank == 0:
        formats.read(arguments.baseline)  # a file that cannot be read is no surprise at the end
    if arguments.preflight:
        code = _in_ranks(nproc, place, preflight_body, debug)
        if code:
            return code

    def body(mine: Place) -> int:
        # torch is imported only now: mistakes above cost no seconds, and before the fork: once.
        from commkit.bench import session

        if pairs:
            return session.run_pairs(arguments, pairs, mine)
        return session.run(arguments, mine)

    if arguments.backend == "fake":
        return body(Place(replace(place.spec, rank=0, world_size=size)))
    if nproc:
        from commkit.bench import session as session
    return _in_ranks(nproc, place, body, debug)


def run_init(options: Options, nproc: int, *, debug: bool = False) -> int:
    """commkit bench init."""
    place = placement.from_environment(nproc)
    from commkit.bench import init

    return _in_ranks(nproc, place, lambda mine: init.run(options, mine), debug)


def run_preflight(nproc: int, *, debug: bool = False) -> int:
    """commkit bench preflight; needs no torch."""
    return _in_ranks(nproc, placement.from_environment(nproc), preflight_body, debug)


def preflight_body(place: Place) -> int:
    from commkit.bench import preflight

    return preflight.run(place.spec)


def _in_ranks(nproc: int, place: Place, body: Callable[[Place], int], debug: bool) -> int:
    return local(nproc, body, debug=debug) if nproc else body(place)


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
