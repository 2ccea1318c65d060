"""commkit bench show, compare, plot: what is done with files of results, no rank involved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from commkit.records import Measurement, to_line

_HELP = {"help_option_names": ["-h", "--help"]}


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that reads files of other tools."""
    function = click.option(
        "--ranks", type=int, default=0, metavar="N", help="Where a file does not say (OSU)."
    )(function)
    return click.option(
        "--collective", default="", metavar="NAME", help="Where a file does not say (nccl-tests)."
    )(function)


def _read(path: str, collective: str, ranks: int) -> list[Measurement]:
    """The records of a file; what its reader noted goes to standard error."""
    from commkit.bench import formats
    from commkit.errors import UsageError

    if ranks < 0:
        raise UsageError(f"--ranks {ranks}: expected the number of ranks, 1 or more")
    reading = formats.read(path, collective=collective, ranks=ranks)
    for note in reading.notes:
        click.echo(f"# {path}: {note}", err=True)
    return reading.records


@click.command("show", context_settings=_HELP)
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--as",
    "kind",
    type=click.Choice(["table", "wide", "json", "csv"]),
    default="table",
    show_default=True,
    help="nccl-tests' columns; those of its -I and more; records; CSV.",
)
@_reading
def show(files: tuple[str, ...], kind: str, collective: str, ranks: int) -> None:
    """Show results of commkit, nccl-tests, OSU or IMB as a table, as records or as CSV.

    FILES are records of commkit (JSON lines), text of nccl-tests, rccl-tests, OSU's
    micro-benchmarks or IMB, and nccl-tests' JSON; each is recognised by its content.
    """
    from commkit.bench.formats import csv, table

    found = [record for path in files for record in _read(path, collective, ranks)]
    lines: Iterable[str]
    if kind == "json":
        lines = map(to_line, found)
    elif kind == "csv":
        lines = csv.lines(found)
    else:
        lines = table.lines(found, wide=kind == "wide")
    for line in lines:
        click.echo(line)


@click.command("compare", context_settings=_HELP)
@click.argument("before")
@click.argument("after")
@click.option(
    "--threshold",
    default="5%",
    show_default=True,
    metavar="P%",
    help="How much slower a row may be.",
)
@_reading
def compare(before: str, after: str, threshold: str, collective: str, ranks: int) -> int:
    """Compare results row by row; exit code 5 if a row is slower, 4 if AFTER has wrong data.

    A row is slower if the 95 % interval of its ratio of times (bootstrap over runs and iterations)
    is above the threshold as a whole.  BEFORE and AFTER are files as `show` reads them, each with
    one run or several.
    """
    from commkit.bench import compare as comparing
    from commkit.bench.arguments import parse_percent

    share = parse_percent("--threshold", threshold)
    first, second = (_read(path, collective, ranks) for path in (before, after))
    found = comparing.compare(first, second, share)
    for line in found.lines():
        click.echo(line)
    return found.exit_code


@click.command("plot", context_settings=_HELP)
@click.argument("files", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    default=("bench.html",),
    show_default=True,
    metavar="FILE",
    help="An .html page, or a .png; several may be given.",
)
@click.option("--link-speed", type=float, metavar="GB/S", help="Of a rank's link, one way.")
@click.option("--title", default="", help="[the files' names]")
@_reading
def plot(
    files: tuple[str, ...],
    outputs: tuple[str, ...],
    link_speed: float | None,
    title: str,
    collective: str,
    ranks: int,
) -> None:
    """Draw results: bandwidth, time and percentiles by size, ranks, pairs, roofline.

    FILES are read as by `show`; with several, each line is named by its file.  The page is one
    file that needs no network; a PNG needs matplotlib.
    """
    from commkit.bench.plots import write

    sources = [(path, _read(path, collective, ranks)) for path in files]
    for path, count in write.write(sources, outputs, link_speed, title):
        click.echo(f"{path}: {count} charts")


COMMANDS = (show, compare, plot)
