"""From checked arguments to an exit code: the launcher's world, or local ranks, or one."""

from __future__ import annotations

from dataclasses import replace

from commkit import launch, settings
from commkit.bench import placement
from commkit.bench.arguments import Arguments
from commkit.errors import UsageError
from commkit.measure.collectives import COLLECTIVES


def run(arguments: Arguments, collective: str, *, debug: bool = False) -> int:
    """Measure `collective` as `arguments` say; the exit code is the same on every rank.

    Raises UsageError and LaunchError before any group is made, and what session.run raises.
    """
    if settings.load().disable:  # then torch starts the group, and records are to say so
        arguments = replace(arguments, stock=True)
    row = COLLECTIVES[collective]
    place = placement.from_environment(arguments.nproc)
    size = arguments.nproc or place.world_size
    if size == 1 and arguments.gates:
        raise UsageError("--min-busbw: bus bandwidth is not defined for one rank; start more")
    # torch is imported only now: mistakes above cost no seconds, and before the fork: once.
    from commkit.bench import launch_local, session

    if not arguments.nproc:
        return session.run(arguments, row, place)

    def body(member: launch_local.Member) -> int:
        spec = launch.resolve(
            init_method=member.init_method, rank=member.rank, world_size=member.world_size
        )
        spec = replace(spec, local_rank=member.rank, local_world_size=member.world_size)
        mine = placement.Place(spec, init_method=member.init_method, forked=True)
        return session.run(arguments, row, mine)

    return launch_local.run(arguments.nproc, body, debug=debug)
