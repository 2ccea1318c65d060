"""One rank of a bench: join the world, sweep, report, leave."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator

from commkit import api
from commkit.bench import device as devices
from commkit.bench.arguments import Arguments
from commkit.bench.blame import Blame
from commkit.bench.pairs import Pairs
from commkit.bench.placement import Place
from commkit.bench.sweep import Sweep
from commkit.bench.watch import Watch
from commkit.bench.worlds import MakeBackend, World, open_world
from commkit.errors import CommkitError, OverlayTimeout, RankDied
from commkit.measure.torch_backend import TorchBackend

#: Seconds for all ranks to join, and for the first collective, which loads kernels and connects.
START_UP = 600.0
_FIRST = 300.0
_LEAVING = 60.0
#: Agents report a death within two seconds; connections break at once.
_REPORT_DELAY = 2.0


def run(arguments: Arguments, place: Place, *, make_backend: MakeBackend = TorchBackend) -> int:
    """The exit code of this rank, after a sweep.

    Raises UsageError, LaunchError and what init_process_group raises; RankDied or OverlayTimeout
    if a peer was lost during the sweep.  A deadline or an interrupt that finds the rank in native
    code ends the process with 124 or 130.
    """

    def body(world: World, watch: Watch, took: float) -> int:
        sweep = Sweep(arguments, place, world.control, watch, world.make_group, world.measured)
        return sweep.run(took, world.phases)

    return _in_a_world(arguments, place, body, make_backend)


def run_pairs(
    arguments: Arguments, which: str, place: Place, *, make_backend: MakeBackend = TorchBackend
) -> int:
    """The same for the matrix of pairs; `which` is one of pairs.WHICH."""

    def body(world: World, watch: Watch, took: float) -> int:
        return Pairs(arguments, which, place, world.measured, watch).run()

    return _in_a_world(arguments, place, body, make_backend)


def _in_a_world(
    arguments: Arguments,
    place: Place,
    body: Callable[[World, Watch, float], int],
    make_backend: MakeBackend,
) -> int:
    backend_name, device = devices.choose(arguments.backend, place)
    devices.share_cores(place.spec.local_world_size or 1)
    with Watch(f"rank {place.rank} of {place.world_size}") as watch:
        # --timeout is for one size; starting is not to fail because a size must be quick.
        join = START_UP if arguments.timeout is None else max(arguments.timeout, _LEAVING)
        # init_process_group has the same deadline and knows who is missing: let it speak first.
        watch.allow(join + 15)
        began = time.monotonic()
        world = open_world(
            backend_name,
            device,
            place,
            stock=arguments.stock,
            seconds=join,
            make_backend=make_backend,
        )
        took = time.monotonic() - began
        watch.allow(min(join, _FIRST))
        watch.phase("first collective")
        watch.calls = lambda: len(world.measured.marks)
        if world.store is not None and place.world_size > 1:
            watch.ask_others = Blame(world.store, place.rank, place.world_size, "sweep").ask
        with _lost_peers(watch, arguments.stock):
            code = body(world, watch, took)
            watch.allow(_LEAVING)
            watch.phase("leaving")
            watch.deferring = False
            # Nobody leaves while another rank still needs it for a last collective.
            world.control.barrier()
        world.close()
        return code


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
