"""`commkit agents`: what runs here for this user, orphans included; how to stop and clean up."""

from __future__ import annotations

import itertools
import json
import time

import click
from rich.console import Console
from rich.table import Table

from commkit import _C, cleanup
from commkit.errors import OverlayError, OverlayTimeout, UsageError
from commkit.overlay import native_errors
from commkit.settings import load

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
    found = _found(names)
    silent = []
    for name, agent in found.items():
        if everything or name in names:
            if "log" not in agent:
                silent.append(f"{name} (pid {agent.get('pid', 'unknown')}) {agent['state']}")
                continue
            _stop(name, timeout)
            click.echo(f"stopped {name}")
    if silent:
        raise OverlayError(
            f"not stopped: {'; '.join(silent)}; `commkit agents clean` ends it when its ranks are "
            "gone, `commkit agents clean --force` at once"
        )


def _stop(name: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    with native_errors():
        _C.stop_agent(name, timeout)
    while name in _names():
        if time.monotonic() > deadline:
            raise OverlayTimeout(
                f"agent {name} is still here {timeout:g} s after it was told "
                "to stop; `commkit agents inspect` shows its log, kill and its pid end it"
            )
        time.sleep(0.02)


@command.command()
@click.argument("names", metavar="[NAME...]", nargs=-1)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option(
    "--older-than",
    metavar="AGE",
    help="Leave alone what is younger: 90s, 15m, 2h, 7d.  [default: 1m for agents, 7d for files]",
)
@click.option("--all", "everything", is_flag=True, help="However young; not with --older-than.")
@click.option("--force", is_flag=True, help="End agents of living jobs too; the jobs fail.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds to wait for each agent.")
def clean(
    names: tuple[str, ...],
    dry_run: bool,
    older_than: str | None,
    everything: bool,
    force: bool,
    timeout: float,
) -> None:
    """Remove what ended jobs have left: agents without ranks, old logs, the bench's directories.

    An agent that answers is stopped if it has neither ranks nor agents below it; one that does not
    answer (stopped by a signal, hung) is killed if none of its ranks lives.  Agents of living jobs
    and their logs stay, and so does everything of other users, of other network namespaces and of
    other log directories than COMMKIT_LOG_DIR's.  With names, only these agents, and no files.
    Says what it did, a line each.
    """
    age = {}
    if everything and older_than is not None:
        raise UsageError("agents clean: --all means however young; leave out --older-than")
    if everything or older_than is not None:
        try:
            age["age"] = cleanup.seconds_of(older_than or "0")
        except ValueError:
            raise UsageError(
                f"--older-than {older_than!r}: expected a number of seconds, or one with s, m, h "
                "or d behind it, such as 15m"
            ) from None
    if names:
        _found(names)
    work = [] if names else [cleanup.clean_files(load(), dry_run=dry_run, **age)]
    work.append(cleanup.clean_agents(names, force=force, dry_run=dry_run, timeout=timeout, **age))
    lines = 0
    for line in itertools.chain(*work):
        lines += 1
        click.echo(line)
    if not lines:
        click.echo("nothing to clean")


def _names() -> set[str]:
    with native_errors():
        return {agent["name"] for agent in _C.agents()}


def _found(names: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
    """The agents that are here, by name; UsageError if one of `names` is not."""
    found = {agent["name"]: agent for agent in cleanup.agents()}
    for name in names:
        if name not in found:
            raise UsageError(
                f"{name!r} is no agent of this user on this host; 'commkit agents' lists them"
            )
    return found
