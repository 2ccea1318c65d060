"""The `commkit` command: finds the subcommand, and turns errors into one line and an exit code.

A subcommand is a module of this package whose `command` is a click command or group.  It is
imported when it is called, so that `commkit --help` needs neither torch nor the native module.
What a command returns, if it is an int, becomes the exit code; errors.py lists the others.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click
from click.exceptions import NoArgsIsHelpError

from commkit import errors, settings
from commkit.version import VERSION

#: subcommand -> its line in `commkit --help`
COMMANDS = {
    "env": "Show what this process understands of its launcher's environment.",
    "place": "Choose which host gets which ranks, so that little crosses switches.",
    "run": "Run an unchanged training script with commkit starting its process groups.",
    "bench": "Measure collectives.",
    "groups": "Show the groups of a parallel layout, their names, and what creating them costs.",
    "topo": "Show descriptions of the fabric, probe its paths, try jobs in a lab.",
    "tune": "Check and explain tables of NCCL's choices for commkit's tuner plugin.",
    "agents": "List, inspect, stop and clean up the agents of this user on this host.",
}


class Root(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"commkit.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # click would import every subcommand to ask for its help.
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            result = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except Exception as error:
            if not standalone_mode:
                raise
            fail(error)
        if not standalone_mode:
            return result
        sys.exit(result if isinstance(result, int) else errors.EXIT_OK)


def fail(error: Exception) -> NoReturn:
    """Print one line for `error` and exit; what commkit did not foresee keeps its traceback."""
    if isinstance(error, NoArgsIsHelpError):
        error.show()
        sys.exit(errors.EXIT_USAGE)
    if isinstance(error, click.Abort):  # click's form of KeyboardInterrupt
        line, code = "interrupted", errors.EXIT_INTERRUPTED
    elif isinstance(error, errors.CommkitError):
        line, code = str(error), error.exit_code
    elif isinstance(error, click.UsageError):
        line, code = error.format_message().rstrip("."), errors.EXIT_USAGE
        if error.ctx is not None:
            line += f"; see '{error.ctx.command_path} --help'"
    elif isinstance(error, click.ClickException):
        line, code = error.format_message(), errors.EXIT_USAGE
    elif isinstance(error, ModuleNotFoundError) and error.name == "torch":
        line = f"no PyTorch in {sys.executable}; install it, or commkit[torch]"
        code = errors.EXIT_LAUNCH
    else:
        raise error
    if debugging():
        traceback.print_exception(error)
    line = " ".join(line.split())
    if not line.isprintable():  # names from files may hold what moves a terminal's cursor
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    click.echo(f"commkit: {line}", err=True)
    sys.exit(code)


def debugging() -> bool:
    # Another variable may be what is wrong: COMMKIT_DEBUG is read on its own.
    name = "COMMKIT_DEBUG"
    try:
        return settings.load({name: os.environ.get(name, "")}).debug
    except errors.LaunchError:
        return False


@click.command(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="commkit", message="%(prog)s %(version)s")
def main() -> None:
    """Start, place and measure the communication of large PyTorch jobs.

    Exit codes: 0 done; 1 a bound was missed or a rank was lost; 2 wrong arguments; 3 the job
    cannot start here; 4 wrong data; 5 slower than a reference; 6 no placement in a
    topology file; 124 a deadline passed; 130 interrupted.
    """
