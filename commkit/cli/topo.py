"""`commkit topo`: what a file, or this host, says about the fabric; other formats of it."""

from __future__ import annotations

import sys
from typing import TextIO

import click
from rich.console import Console

from commkit.cli import topo_lab, topo_probe
from commkit.errors import UsageError
from commkit.topology import draw, picture
from commkit.topology.fabric import Fabric
from commkit.topology.hostlist import expand
from commkit.topology.readers import FORMATS, node, read
from commkit.topology.readers.nccl_xml import missing_devices
from commkit.topology.writers import WRITERS, write

EPILOG = "Formats: " + "; ".join(f"{name}: {entry.what}" for name, entry in FORMATS.items()) + "."

file_format = click.option(
    "--format", "format_", metavar="FORMAT", help="Of FILE; without it, found by the content."
)
name_option = click.option("--name", metavar="NAME", help="Which topology, where FILE has several.")
hosts_option = click.option(
    "--hosts", metavar="HOSTLIST", help="Only these hosts, in this order: gpu-[001-064]."
)


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
@click.option("--limit", default=draw.LIMIT, help="Entries below one switch.", show_default=True)
@click.option("--svg", metavar="OUT", help="Draw into an SVG file.")
@click.option("--png", metavar="OUT", help="Draw into a PNG file.")
def show(
    file: str | None,
    format_: str | None,
    name: str | None,
    hosts: str | None,
    here: bool,
    limit: int,
    svg: str | None,
    png: str | None,
) -> None:
    """Show hosts and switches of FILE as a tree."""
    if file is None:
        if not here:
            raise UsageError("topo show: expected a FILE, or --here for this host")
        fabric = node.read()
    else:
        fabric = _fabric(file, format_, name, hosts)
    # A pipe has no width: what is folded there cannot be searched.
    width = None if sys.stdout.isatty() else 10_000
    Console(highlight=False, width=width).print(draw.tree(fabric, max(limit, 1)))
    for path, kind in ((svg, "svg"), (png, "png")):
        if path is not None:
            picture.save(fabric, path, kind)
    if file is not None and here:
        wrong = missing_devices(fabric, node.addresses())
        click.echo(wrong or "every device of this file is in this host")


@command.command(epilog=EPILOG)
@click.argument("file")
@file_format
@name_option
@hosts_option
@click.option("--to", type=click.Choice(list(WRITERS)), required=True)
@click.option("-o", "--output", metavar="OUT", type=click.File("w", lazy=True), default="-")
def convert(
    file: str,
    format_: str | None,
    name: str | None,
    hosts: str | None,
    to: str,
    output: TextIO,
) -> None:
    """Write FILE's fabric as commkit's TOML or JSON, or as Slurm's topology.conf."""
    output.write(write(_fabric(file, format_, name, hosts), to))


def _fabric(file: str, format_: str | None, name: str | None, hosts: str | None) -> Fabric:
    fabric = read(file, format_, name)
    return fabric if hosts is None else fabric.select(expand(hosts))
