"""`commkit place`: which host gets which ranks, what that saves, and the file a launcher reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from commkit import placing
from commkit.errors import UsageError
from commkit.layout import ORDER
from commkit.topology.emit import FORMATS
from commkit.topology.readers import read
from commkit.topology.score import OBJECTIVES, Least, Score

#: Columns that the table gets even if the terminal, or a pipe, has fewer.
WIDTH = 120
#: Kinds of fabric that --advice knows.
KINDS = ("roce", "tcp", "infiniband", "infiniband-adaptive")


@click.command("place")
@click.option("--topology", required=True, metavar="FILE", help="What the fabric looks like.")
@click.option(
    "--format", "form", metavar="NAME", help="Of the topology's file, if it is not recognised."
)
@click.option(
    "--hosts",
    required=True,
    metavar="LIST",
    help="The job's hosts in the launcher's order: n[1-64], or @FILE with a host a line.",
)
@click.option("--layout", required=True, metavar="SIZES", help="tp=8,cp=2,dp=16,pp=8")
@click.option("--order", default=ORDER, show_default=True, help="Neighbouring ranks first.")
@click.option("--ranks-per-host", default=8, show_default=True, metavar="N", help="On each host.")
@click.option(
    "--traffic",
    multiple=True,
    metavar="FAMILY=COLLECTIVE[/ALGORITHM]:BYTES",
    help="What a family does in a step, such as dp=all_reduce:10.9G; may be repeated.",
)
@click.option("--model", metavar="SIZES", help="parameters=175e9,layers=96,hidden=12288,...")
@click.option(
    "--objective",
    type=click.Choice(list(OBJECTIVES)),
    default="time",
    show_default=True,
    help="time: also the expected time of hashed flows; bytes: without it.",
)
@click.option("--uplinks", type=int, metavar="N", help="Of a leaf, if the topology says nothing.")
@click.option("--uplink-gbps", type=float, metavar="GBPS", help="Of one of them.")
@click.option("--nic-gbps", type=float, metavar="GBPS", help="Of a NIC.")
@click.option("--queue-pairs", default=1, show_default=True, metavar="N", help="Of a connection.")
@click.option("--metis", is_flag=True, help="METIS as one more contender (pip install pymetis).")
@click.option("--advice", type=click.Choice(KINDS), help="What to try against collisions.")
@click.option("--lost", metavar="LIST", help="Hosts of a running job that are gone.")
@click.option("--spare", metavar="LIST", help="Hosts that may take their places.")
@click.option("--moves", default=0, show_default=True, metavar="N", help="Survivors that may move.")
@click.option("--emit", type=click.Choice(FORMATS), help="Print this instead of the report.")
@click.option("--output", metavar="FILE", help="Write what --emit names here, and report.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(
    topology: str,
    form: str | None,
    hosts: str,
    layout: str,
    order: str,
    ranks_per_host: int,
    traffic: tuple[str, ...],
    model: str | None,
    objective: str,
    uplinks: int | None,
    uplink_gbps: float | None,
    nic_gbps: float | None,
    queue_pairs: int,
    metis: bool,
    advice: str | None,
    lost: str | None,
    spare: str | None,
    moves: int,
    emit: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Choose the order of whole hosts for a layout on a fabric, and say how good it is.

    Bytes that cross switches are shown over their lower bound, beside the launcher's order,
    Slurm's, the names' and a random one.  With --lost the hosts are those of a running job in rank
    order.

    Exit code 2 for a wrong argument or file, 6 if the topology places none of the hosts.
    """
    if traffic and model:
        raise UsageError("--traffic and --model: expected one of them")
    if output and not emit:
        raise UsageError(f"--output {output}: say with --emit what to write")
    wish = placing.Wish(
        placing.host_names(hosts),
        layout,
        ranks_per_host,
        order,
        placing.parse_work(traffic) if traffic else None,
        placing.parse_model(model) if model else None,
        objective,
        queue_pairs,
        uplinks,
        uplink_gbps,
        nic_gbps,
        ("metis",) if metis else (),
    )
    fabric = read(topology, form)
    if lost or spare:
        found = placing.repaired(
            wish,
            fabric,
            placing.host_names(lost) if lost else (),
            placing.host_names(spare) if spare else (),
            moves,
        )
        _write(found.emit(emit) if emit else "", output)
        if as_json:
            click.echo(json.dumps(found.report()))
        elif not emit or output:
            _print_repaired(found)
        return
    placed = placing.placed(wish, fabric)
    _write(placed.emit(emit) if emit else "", output)
    if as_json:
        click.echo(json.dumps(placed.report()))
    elif not emit or output:
        _print(placed, advice)


def _write(text: str, output: str | None) -> None:
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        Path(output).write_text(text)
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}") from None


def _print(placed: placing.Placed, kind: str | None) -> None:
    console = _console()
    plan = placed.plan
    table = Table(title=f"{len(placed.hosts)} hosts, by {plan.how}")
    table.add_column("order")
    for layer in placed.seats.layers:
        table.add_column(f"leave {layer.name}\nGB a step", justify="right")
        table.add_column("over\nbound", justify="right")
        table.add_column("fullest\nGB", justify="right")
    table.add_column("s hashed", justify="right")
    table.add_column("s planned", justify="right")
    table.add_row("plan", *_cells(plan.score, plan.least))
    for name, score in placed.baselines:
        table.add_row(name, *_cells(score, plan.least))
    bound = [
        cell
        for total, full in zip(plan.least.crossing, plan.least.fullest, strict=True)
        for cell in (_gb(total), "1.00", _gb(full))
    ]
    nic = "-" if plan.least.nic is None else f"{plan.least.nic:.4f}"
    table.add_row("bound", *bound, nic, nic)
    console.print(table)
    most = 16
    for ranks, host in placing.rank_ranges(placed.hosts, placed.wish.ranks_per_host, most):
        console.print(f"ranks {ranks}: {host}", soft_wrap=True)
    if len(placed.hosts) > most:
        console.print(f"... and {len(placed.hosts) - most} more hosts: --emit or --json")
    for note in placed.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    for one in placed.advice(kind) if kind else ():
        settings = " ".join(f"{name}={value}" for name, value in one.settings)
        console.print(
            f"{one.kind}: {settings}{': ' if settings else ''}{one.reason}", soft_wrap=True
        )
    console.print(f"digest {placed.digest}", soft_wrap=True)


def _print_repaired(found: placing.Repaired) -> None:
    console = _console()
    moved = ", ".join(found.moved) or "none"
    console.print(f"surviving hosts that move: {moved}", soft_wrap=True)
    for ranks, old, new in found.changes:
        console.print(f"ranks {ranks}: {new} instead of {old}", soft_wrap=True)
    for when, score in (("before", found.before), ("after", found.after)):
        sent = ", ".join(_gb(amount) for amount in score.crossing) or "0"
        console.print(f"{when}: {sent} GB a step leave their group, for each layer of switches")


def _cells(score: Score, least: Least) -> list[str]:
    cells = []
    for total, full, bound in zip(score.crossing, score.fullest, least.crossing, strict=True):
        over = "-" if bound <= 0 else f"{total / bound:.2f}"
        cells += [_gb(total), over, _gb(full)]
    for seconds in (score.hashed, score.planned):
        cells.append("-" if seconds is None else f"{seconds:.4f}")
    return cells


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.4g}"


def _console() -> Any:
    console = Console(markup=False, highlight=False, emoji=False)
    console.width = max(console.width, WIDTH)
    return console
