"""The `commkit` command maps every kind of failure to one line and the documented exit code."""

from __future__ import annotations

import importlib
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from commkit import cli, errors
from commkit.version import VERSION


@pytest.fixture
def run(monkeypatch):
    """Run `commkit env` with an `env` subcommand that does what the test says."""

    def with_body(body, **environment):
        command = click.Command("env", callback=body)
        monkeypatch.setattr(cli.Root, "get_command", lambda self, ctx, name: command)
        return CliRunner().invoke(cli.main, ["env"], prog_name="commkit", env=environment)

    return with_body


def raising(error):
    def body():
        raise error

    return body


def subclasses(base):
    for cls in base.__subclasses__():
        yield cls
        yield from subclasses(cls)


@pytest.mark.parametrize("error", sorted(subclasses(errors.CommkitError), key=str))
def test_an_error_of_commkit_is_one_line_and_its_exit_code(run, error):
    result = run(raising(error("rank 3 is missing;\n  start it")))
    assert result.stderr == "commkit: rank 3 is missing; start it\n"
    assert result.exit_code == error.exit_code
    assert result.stdout == ""


def test_debug_adds_the_traceback_before_the_line(run):
    result = run(raising(errors.LaunchError("RANK='x'")), COMMKIT_DEBUG="1", COMMKIT_PORT="bad")
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("\ncommkit: RANK='x'\n")
    assert result.exit_code == 3


def test_a_wrong_debug_value_does_not_hide_the_error(run):
    result = run(raising(errors.LaunchError("RANK='x'")), COMMKIT_DEBUG="yes")
    assert result.stderr == "commkit: RANK='x'\n"


def test_an_interrupt_exits_130(run):
    result = run(raising(KeyboardInterrupt()))
    assert result.exit_code == 130
    assert result.stderr.strip() == "commkit: interrupted"


def test_missing_torch_is_named(run):
    result = run(raising(ModuleNotFoundError("No module named 'torch'", name="torch")))
    assert result.exit_code == 3
    assert result.stderr.startswith("commkit: no PyTorch in ")
    assert result.stderr.count("\n") == 1


def test_an_unforeseen_error_is_not_swallowed(run):
    error = ZeroDivisionError("a bug")
    assert run(raising(error)).exception is error


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (4, 4), ("text", 0)])
def test_an_int_that_a_command_returns_is_the_exit_code(run, returned, code):
    assert run(lambda: returned).exit_code == code


@pytest.mark.parametrize("arguments", [["no-such-command"], ["--no-such-option"]])
def test_wrong_arguments_are_one_line_with_exit_code_2(arguments):
    result = CliRunner().invoke(cli.main, arguments, prog_name="commkit")
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
    assert result.stderr.startswith("commkit: ")
    assert result.stderr.endswith("see 'commkit --help'\n")
    assert result.stderr.count("\n") == 1


def test_no_arguments_show_the_help_and_exit_2():
    result = CliRunner().invoke(cli.main, [], prog_name="commkit")
    assert result.exit_code == 2
    assert all(name in result.stderr for name in cli.COMMANDS)


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_listed_subcommand_is_a_module_with_a_command(name):
    command = importlib.import_module(f"commkit.cli.{name}").command
    assert isinstance(command, click.Command)
    assert command.get_short_help_str()


def test_version_and_help_import_neither_torch_nor_the_native_module():
    script = (
        "import sys, commkit.cli\n"
        "for arguments in (['--version'], ['--help']):\n"
        "    try: commkit.cli.main(arguments, prog_name='commkit')\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        "print(sorted({'torch', 'commkit._C', 'commkit.api'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"commkit {VERSION}\n")
    assert done.stdout.endswith("\n[]\n")
