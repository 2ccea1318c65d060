"""commkit bench: flags of nccl-tests, checked and handed to commkit.bench."""

from __future__ import annotations

from typing import Any

import click

from commkit import settings


@click.group()
def command() -> None:
    """Measure collectives over message sizes.

    Under torchrun, srun or mpiexec the ranks of that job are measured; alone, --nproc N starts N
    ranks on this host.
    """


@command.command("all_reduce", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-b", "--minbytes", metavar="SIZE", help="Smallest size [32M]; K, M, G, T: 1024s.")
@click.option("-e", "--maxbytes", metavar="SIZE", help="Largest size [32M].")
@click.option("-f", "--stepfactor", type=int, metavar="N", help="Multiply the size by this.")
@click.option("-i", "--stepbytes", metavar="SIZE", help="Add this to the size [1M].")
@click.option("-n", "--iters", type=int, default=20, show_default=True, help="Timed iterations.")
@click.option("-w", "--warmup_iters", type=int, default=1, show_default=True, help="Untimed ones.")
@click.option("-c", "--check", type=int, default=1, show_default=True, help="Passes; 0: none.")
@click.option("-o", "--op", default="sum", show_default=True, help="sum prod max min avg, or all.")
@click.option("-d", "--datatype", default="float", show_default=True, help="A type, or all.")
@click.option("--nproc", type=int, metavar="N", help="Start N ranks on this host.")
@click.option("--backend", default="auto", show_default=True, help="torch's name: nccl, gloo, ...")
@click.option("--stock", is_flag=True, help="Start the group by torch.distributed itself.")
@click.option("--json", default="", metavar="FILE", help="Append records (JSON lines); -: stdout.")
@click.option(
    "--min-busbw",
    multiple=True,
    metavar="[SIZE:]GB/S",
    help="Exit 1 if a size (from SIZE on) has less bus bandwidth in place.",
)
@click.option("--timeout", type=float, metavar="S", help="Seconds for one size, then exit 124.")
def all_reduce(**flags: Any) -> int:
    """All-reduce, out of place and in place, with nccl-tests' columns.

    The time of a row is the median over its iterations of the slowest rank's.  Exit codes: 0 done,
    1 below --min-busbw or a rank was lost, 2 wrong arguments, 3 the job cannot start, 4 wrong
    data, 124 a deadline passed, 130 interrupted (what was measured is kept).
    """
    from commkit.bench import arguments, main

    return main.run(arguments.plan(**flags), "all_reduce", debug=settings.load().debug)
