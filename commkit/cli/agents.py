"""`commkit agents`: what runs here for this user, orphans included, and how to stop it."""

from __future__ import annotations

import json
import time

import click
from rich.console import Console
from rich.table import Table

from commkit import _C
from commkit.errors import OverlayTimeout, UsageError
from commkit.overlay import native_errors

#: column -> the agent's own name for it
COLUMNS = {
    "agent": "name",
    "pid": "pid",
    "seconds": "seconds",
    "role": "role",
    "state": "state",
    "ranks": "ranks",
    "of": "world_size",
    "hosts": "hosts",
}


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line and agent.")
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List the agents of this user in this host's network namespace, inspect or stop some.

    An agent leaves by itself when its ranks have left or died; one that is still here without
    ranks serves the agents below it.
    """
    if context.invoked_subcommand is not None:
        if as_json:
            raise UsageError(
                f"agents: --json is for the list, not for {context.invoked_subcommand}"
            )
        return
    found = _found()
    if as_json:
        for agent in found.values():
            click.echo(json.dumps(agent, sort_keys=True))
        return
    if not found:
        click.echo("no agents of this user on this host")
        return
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, no_wrap=column != "ranks", overflow="fold")
    for agent in found.values():
        table.add_row(*(agent.get(name, "") for name in COLUMNS.values()))
    Console(highlight=False).print(table)


@command.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def inspect(names: tuple[str, ...]) -> None:
    """Show everything that agents say about themselves: epoch, ports, counters, log file."""
    found = _found(names)
    for number, name in enumerate(names):
        if number:
            click.echo()
        width = max(map(len, found[name]))
        for field in sorted(found[name], key=lambda field: (field != "name", field)):
            click.echo(f"{field:<{width}}  {found[name][field]}")


@command.command()
@click.argument("names", metavar="NAME...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Stop every agent of this user here.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds to wait for each.")
def stop(names: tuple[str, ...], everything: bool, timeout: float) -> None:
    """Stop agents by the names that `commkit agents` shows; their jobs fail at once."""
    if everything == bool(names):
        raise UsageError("agents stop: expected names of agents or --all, and not both")
    _found(names)
    for name in names or _found():
        deadline = time.monotonic() + timeout
        with native_errors():
            _C.stop_agent(name, timeout)
        while name in _found():
            if time.monotonic() > deadline:
                raise OverlayTimeout(
                    f"agent {name} is still here {timeout:g} s after it was told "
                    "to stop; `commkit agents inspect` shows its log, kill and its pid end it"
                )
            time.sleep(0.02)
        click.echo(f"stopped {name}")


def _found(names: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
    """The agents that are here, by name; UsageError if one of `names` is not."""
    with native_errors():
        found = {agent["name"]: agent for agent in _C.agents()}
    for name in names:
        if name not in found:
            raise UsageError(
                f"{name!r} is no agent of this user on this host; 'commkit agents' lists them"
            )
    return found
