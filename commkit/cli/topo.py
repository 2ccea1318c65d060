"""`commkit topo`: what a file, or this host, says about the fabric; other formats of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

import click
from rich.console import Console

from commkit.cli import topo_lab, topo_probe
from commkit.errors import UsageError
from commkit.ranks import runs
from commkit.topology import draw, picture
from commkit.topology.fabric import Fabric
from commkit.topology.hostlist import expand
from commkit.topology.readers import FORMATS, node, read
from commkit.topology.readers.nccl_xml import missing_devices
from commkit.topology.writers import WRITERS, write

if TYPE_CHECKING:
    from commkit.observed import Running

EPILOG = "Formats: " + "; ".join(f"{name}: {entry.what}" for name, entry in FORMATS.items()) + "."

file_format = click.option(
    "--format", "format_", metavar="FORMAT", help="Of FILE; without it, found by the content."
)
name_option = click.option("--name", metavar="NAME", help="Which topology, where FILE has several.")
hosts_option = click.option(
    "--hosts", metavar="HOSTLIST", help="Only these hosts, in this order: gpu-[001-064]."
)
running_option = click.option(
    "--running",
    is_flag=True,
    help="The hosts of the job that this command is started in as every rank; rank 0 answers. "
    "With FILE: their places in it.",
)

#: Seconds that the ranks of a job wait for one another.
TIMEOUT = 600.0


@click.group()
def command() -> None:
    """Show and convert descriptions of the fabric; probe its paths; make one in a lab."""


command.add_command(topo_probe.command)
command.add_command(topo_lab.command)


@command.command(epilog=EPILOG)
@click.argument("file", required=False)
@file_format
@name_option
@hosts_option
@click.option("--here", is_flag=True, help="This host; with FILE: whether FILE is of this host.")
@running_option
@click.option("--limit", default=draw.LIMIT, help="Entries below one switch.", show_default=True)
@click.option("--svg", metavar="OUT", help="Draw into an SVG file.")
@click.option("--png", metavar="OUT", help="Draw into a PNG file.")
def show(
    file: str | None,
    format_: str | None,
    name: str | None,
    hosts: str | None,
    here: bool,
    running: bool,
    limit: int,
    svg: str | None,
    png: str | None,
) -> None:
    """Show hosts and switches of FILE as a tree."""
    job = None
    if running:
        if here:
            raise UsageError("--here and --running: expected one of them")
        job = _job(file, format_, name, hosts)
        if job is None:
            return  # rank 0 answers
        fabric = job.fabric
    elif file is None:
        if not here:
            raise UsageError("topo show: expected a FILE, --here for this host or --running")
        fabric = node.read()
    else:
        fabric = _fabric(file, format_, name, hosts)
    # A pipe has no width: what is folded there cannot be searched.
    width = None if sys.stdout.isatty() else 10_000
    Console(highlight=False, width=width).print(draw.tree(fabric, max(limit, 1)))
    if job is not None:
        for host, ranks in list(zip(fabric.hosts, job.ranks, strict=True))[: max(limit, 1)]:
            on = [job.devices[rank] for rank in ranks]
            click.echo(f"ranks {runs(ranks)}: {host.name}" + _bound(on))
    for path, kind in ((svg, "svg"), (png, "png")):
        if path is not None:
            picture.save(fabric, path, kind)
    if file is not None and here:
        wrong = missing_devices(fabric, node.addresses())
        click.echo(wrong or "every device of this file is in this host")


@command.command(epilog=EPILOG)
@click.argument("file", required=False)
@file_format
@name_option
@hosts_option
@running_option
@click.option("--to", type=click.Choice(list(WRITERS)), required=True)
@click.option("-o", "--output", metavar="OUT", type=click.File("w", lazy=True), default="-")
def convert(
    file: str | None,
    format_: str | None,
    name: str | None,
    hosts: str | None,
    running: bool,
    to: str,
    output: TextIO,
) -> None:
    """Write FILE's fabric as commkit's TOML or JSON, or as Slurm's topology.conf."""
    if running:
        job = _job(file, format_, name, hosts)
        if job is not None:
            output.write(write(job.fabric, to))
    elif file is None:
        raise UsageError("topo convert: expected a FILE, or --running")
    else:
        output.write(write(_fabric(file, format_, name, hosts), to))


def _job(
    file: str | None, format_: str | None, name: str | None, hosts: str | None
) -> Running | None:
    """The hosts of the job of which this process is a rank, at rank 0; None at the others."""
    from commkit import launch, observed, overlay  # the native module, which files do not need

    if hosts is not None:
        raise UsageError("--hosts and --running: the job has its own hosts; expected one of them")
    spec = launch.resolve()
    world = overlay.join(spec, TIMEOUT)
    try:
        # Not before: the others would wait for a rank 0 that has stopped at an error.
        network = None
        if file is not None and spec.rank == 0:
            network = _fabric(file, format_, name, None)
        found = observed.gather(world, network, timeout=TIMEOUT)
    except BaseException as error:
        world.abandon(f"{type(error).__name__}: {error}")
        raise
    world.leave()
    return found


def _bound(devices: Sequence[str | None]) -> str:
    known = [device or "?" for device in devices]
    return f" ({', '.join(known)})" if any(devices) else ""


def _fabric(file: str, format_: str | None, name: str | None, hosts: str | None) -> Fabric:
    fabric = read(file, format_, name)
    return fabric if hosts is None else fabric.select(expand(hosts))
