"""commkit bench: flags of nccl-tests, checked and handed to commkit.bench."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from commkit import settings
from commkit.cli import bench_files
from commkit.measure.collectives import COLLECTIVES

_HELP = {"help_option_names": ["-h", "--help"]}
#: What `commkit bench` alone measures, and how many ranks it starts where no launcher did.
_DEFAULT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
_DEFAULT_NPROC = 4

_RUN = (
    click.option("--nproc", type=int, metavar="N", help="Start N ranks on this host."),
    click.option(
        "--backend",
        default="auto",
        show_default=True,
        help="torch's name (nccl, gloo, ...), mpi (mpi4py), cupy (NCCL itself), fake (simulated).",
    ),
    click.option("--stock", is_flag=True, help="Start the group by torch.distributed itself."),
    click.option("--json", default="", metavar="FILE", help="Append records; -: stdout."),
    click.option("--timeout", type=float, metavar="S", help="Seconds for one size, else exit 124."),
)
_SWEEP = (
    click.option("-b", "--minbytes", metavar="SIZE", help="Smallest size [32M]; K M G T: 1024s."),
    click.option("-e", "--maxbytes", metavar="SIZE", help="Largest size [32M]."),
    click.option("-f", "--stepfactor", type=int, metavar="N", help="Multiply the size by this."),
    click.option("-i", "--stepbytes", metavar="SIZE", help="Add this to the size [1M]."),
    click.option("-n", "--iters", type=int, help="Timed iterations [20]; with --budget: at most."),
    click.option("-w", "--warmup_iters", type=int, default=1, show_default=True, help="Untimed."),
    click.option("-c", "--check", type=int, default=1, show_default=True, help="Passes; 0: none."),
    click.option("-o", "--op", default="sum", show_default=True, help="sum prod max min avg, all."),
    click.option("-d", "--datatype", default="float", show_default=True, help="A type, or all."),
    click.option("-r", "--root", type=int, default=0, show_default=True, help="Of the group."),
    click.option("-m", "--agg_iters", type=int, default=1, show_default=True, help="Coalesced."),
    click.option("-G", "--cudagraph", type=int, default=0, metavar="N", help="N calls a graph."),
    click.option("--async", "asynchronous", is_flag=True, help="Issue each call, then wait."),
    click.option("--budget", type=float, metavar="S", help="Seconds of iterations for one size."),
    click.option("--precision", metavar="P%", help="Repeat until the median is this well known."),
    click.option("--layout", default="", metavar="TEXT", help="tp=2,pp=2: run in its groups."),
    click.option("--group", default="", metavar="FAMILY", help="... of this family."),
    click.option("--concurrent", default="", metavar="F:C,...", help="... of several at once."),
    click.option("--groups", default="", metavar="RULE", help="split-by-host, rail, /N or %N."),
    click.option("--link-speed", type=float, metavar="GB/S", help="Of a rank's link, one way."),
    click.option("--preflight", is_flag=True, help="First see which host cannot reach which."),
    click.option("--dry-run", is_flag=True, help="Print plan, memory and expected time."),
    click.option("--wide", is_flag=True, help="With spread, slowest rank, skew, % of the link."),
    click.option("--baseline", default="", metavar="FILE", help="Exit 5 if slower than this."),
    click.option("--threshold", default="5%", show_default=True, help="... by more than this."),
    click.option(
        "--min-busbw",
        multiple=True,
        metavar="[SIZE:]GB/S",
        help="Exit 1 if a size (from SIZE on) has less bus bandwidth in place.",
    ),
)


def _options(options: tuple[Callable[[Any], Any], ...]) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return add


_PAIRS = ("ring", "bisection", "rail", "hosts")


@click.group(invoke_without_command=True, context_settings=_HELP)
@_options(_RUN)
@click.pass_context
def command(context: click.Context, /, **flags: Any) -> int:
    """Measure collectives over message sizes.

    Under torchrun, srun or mpiexec the ranks of that job are measured; alone, --nproc N starts N
    ranks on this host.  Without a collective: the common ones, 8 B to 32 MiB, 4 ranks if alone.
    """
    if context.invoked_subcommand is not None:
        given = [name for name, value in flags.items() if value not in (None, "", False, "auto")]
        if given:
            raise click.UsageError(
                f"--{given[0]} stands before {context.invoked_subcommand}: expected after it"
            )
        return 0
    from commkit.bench import arguments, main

    plan = arguments.plan(
        collective=_DEFAULT,
        minbytes="8",
        maxbytes="32M",
        stepfactor=4,
        iters=20,
        budget=0.05,
        **flags,
    )
    return main.run(plan, default_nproc=_DEFAULT_NPROC, debug=settings.load().debug)


def _measure(name: str, dry_run: bool, **flags: Any) -> int:
    from commkit.bench import arguments, main

    plan = arguments.plan(collective=name, **flags)
    return main.run(plan, dry_run=dry_run, debug=settings.load().debug)


_COMMON = """

The time of a row is the median over its iterations of the slowest rank's.  Exit codes: 0 done,
1 below --min-busbw or a rank was lost, 2 wrong arguments, 3 the job cannot start, 4 wrong
data, 5 slower than --baseline, 124 a deadline passed, 130 interrupted (what was measured is kept).
"""


def _add(name: str) -> None:
    @_options(_RUN)
    @_options(_SWEEP)
    def measure(**flags: Any) -> int:
        return _measure(name, **flags)

    row = COLLECTIVES[name]
    text = f"{name.replace('_', ' ').capitalize()}, out of place and in place.{_COMMON}"
    if not row.moves:
        text = f"Barrier.{_COMMON}"
    command.command(name, help=text, short_help=text.partition(".")[0], context_settings=_HELP)(
        measure
    )


@command.command("pairs", context_settings=_HELP)
@_options(_RUN)
@click.option("-b", "--minbytes", default="1M", show_default=True, help="Size for bandwidth.")
@click.option("-n", "--iters", type=int, default=10, show_default=True, help="Of each pair.")
@click.option("-w", "--warmup_iters", type=int, default=2, show_default=True, help="Untimed.")
@click.option("-c", "--check", type=int, default=1, show_default=True, help="0: no verification.")
@click.option("--ring", "which", flag_value="ring", help="Only each rank and the next.")
@click.option("--bisection", "which", flag_value="bisection", help="Half the world away, at once.")
@click.option("--rail", "which", flag_value="rail", help="Ranks of equal place on every two hosts.")
@click.option("--hosts", "which", flag_value="hosts", help="One rank of each host.")
def pairs(which: str | None, minbytes: str, **flags: Any) -> int:
    """Latency and bandwidth between every two ranks, and which pairs are unlike the others.

    In rounds of disjoint pairs, all pairs of a round at once: N ranks take N - 1 rounds.
    """
    from commkit.bench import arguments, main

    plan = arguments.plan(minbytes=minbytes, maxbytes=minbytes, **flags)
    return main.run(plan, pairs=which or "all", debug=settings.load().debug)


@command.command("init", context_settings=_HELP)
@click.option("--nproc", type=int, metavar="N", help="Start N ranks on this host.")
@click.option("--backend", default="auto", show_default=True, help="torch's name.")
@click.option("--layout", default="", metavar="TEXT", help="Make its groups too: tp=2,dp=2.")
@click.option("--cycles", type=click.IntRange(1, 1000), default=5, show_default=True, help="Each.")
@click.option("--stock", is_flag=True, help="Stock torch alone.")
@click.option("--timeout", type=float, metavar="S", help="Seconds for one cycle, else exit 124.")
def init(nproc: int | None, **flags: Any) -> int:
    """How long a start takes, phase by phase, by commkit and beside it by stock torch."""
    from commkit.bench import main
    from commkit.bench.init import Options

    return main.run_init(Options(**flags), nproc or 0, debug=settings.load().debug)


@command.command("preflight", context_settings=_HELP)
@click.option("--nproc", type=int, metavar="N", help="Start N ranks on this host.")
def preflight(nproc: int | None) -> int:
    """Which host cannot reach which, and in which versions and variables ranks differ.

    Exit code 3 if a host cannot reach another one.
    """
    from commkit.bench import main

    return main.run_preflight(nproc or 0, debug=settings.load().debug)


for _name in COLLECTIVES:
    _add(_name)

# What needs no ranks: files of results.
for _command in bench_files.COMMANDS:
    command.add_command(_command)
