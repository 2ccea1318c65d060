"""`commkit tune`: NCCL's tuner table, checked and explained by the code that NCCL will run."""

from __future__ import annotations

import dataclasses
import json

import click

from commkit import tuner


@click.group("tune")
def command() -> None:
    """Check and explain tables of NCCL's choices, which commkit's tuner plugin applies.

    NCCL_TUNER_PLUGIN names the plugin (`commkit tune plugin` prints its path), COMMKIT_TUNER_TABLE
    the table; both are to be equal on every rank.
    """


@command.command("plugin")
def plugin() -> None:
    """Print the plugin's path, for NCCL_TUNER_PLUGIN."""
    click.echo(tuner.PLUGIN)


@command.command("check")
@click.argument("table", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def check(table: str, as_json: bool) -> None:
    """Read TABLE as NCCL will: exit code 2, with line and column, if it would not be used."""
    read = tuner.read(table)
    shadowed = [row for row in read.rows if row.shadowed_by]
    if as_json:
        rows = [dataclasses.asdict(row) for row in read.rows]
        click.echo(json.dumps({"fingerprint": read.fingerprint, "rows": rows}))
        return
    for row in shadowed:
        click.echo(
            f"{table}:{row.line}: never used: line {row.shadowed_by} applies wherever it does"
        )
    click.echo(f"{table}: {len(read.rows)} rows, fingerprint {read.fingerprint}")


@command.command("explain")
@click.argument("table", type=click.Path())
@click.option("--collective", required=True, type=click.Choice(tuner.COLLECTIVES), metavar="NAME")
@click.option("--size", required=True, metavar="BYTES", help="Such as 8M, as NCCL counts them.")
@click.option("--ranks", required=True, type=int, metavar="N", help="Of the communicator.")
@click.option("--nodes", required=True, type=int, metavar="N", help="Of the communicator.")
@click.option("--registered", is_flag=True, help="Buffers are registered.")
def explain(
    table: str, collective: str, size: str, ranks: int, nodes: int, registered: bool
) -> None:
    """Which row of TABLE decides about a collective, and why others do not."""
    read = tuner.read(table)
    call = tuner.Call(collective, tuner.size(size), ranks, nodes, registered)
    winner = tuner.decides(read, call)
    if winner is None:
        click.echo("no row applies: NCCL chooses")
    else:
        click.echo(f"{table}:{winner.line}: {winner.text()}")
    for row in read.rows:
        if row is winner or row.collective != collective:
            continue
        reason = tuner.why_not(row, call)
        if not reason and winner is not None:
            reason = f"comes after line {winner.line}, which applies"
        click.echo(f"  not line {row.line}: {reason}")
    if winner is not None and winner.algorithm is not None:
        click.echo(
            "NCCL keeps its own choice where it cannot use that algorithm and protocol, or where "
            "NCCL_ALGO or NCCL_PROTO is set."
        )
