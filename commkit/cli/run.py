"""`commkit run SCRIPT [ARGS]`: an unchanged script, its process groups started by commkit.

The script sees what `python SCRIPT ARGS` shows it: sys.argv, sys.path[0], `__main__`, its own
traceback, its exit code.  torch is imported when the script imports it, not before.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import zipfile
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

import click

from commkit import patch
from commkit.errors import EXIT_INTERRUPTED, CommkitError, UsageError
from commkit.settings import load


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run an unchanged training script with commkit starting its process groups.",
)
@click.option("-m", "module", metavar="MODULE", help="Run a module, as python -m does.")
@click.argument("arguments", metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(module: str | None, arguments: tuple[str, ...]) -> None:
    """Run a Python script, or a module with -m, with commkit starting its process groups.

    Use it where the launcher would run python: torchrun --no-python ... commkit run train.py,
    srun commkit run train.py.  torch.distributed.init_process_group then goes through the agent
    tree, also in processes that the script starts by multiprocessing (fork, spawn, forkserver);
    a child started by exec, such as subprocess, runs on stock torch unless it is started by
    commkit run too.  COMMKIT_DISABLE=1 runs the script on stock torch.  The exit code is the
    script's; an interrupt is 130.
    """
    if module is None and not arguments:
        raise UsageError("run: expected SCRIPT or -m MODULE; see 'commkit run --help'")
    settings = load()
    if not settings.disable:
        patch.install()
        if settings.topology:
            from commkit import reorder

            reorder.rewrite_environment(os.environ, settings)
    if module is not None:
        sys.argv = [module, *arguments]  # what a package's __init__ sees before its main runs
        _set_first_path(os.getcwd())
        main, code = _module(module)
    else:
        sys.argv = list(arguments)
        main, code = _script(arguments[0])
    _execute(main, code)


def _script(path: str) -> tuple[ModuleType, CodeType]:
    """`__main__` and its code, from a file or from a directory or zip file with a __main__.py."""
    shown, path = path, os.path.abspath(path)
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        _set_first_path(path)
        spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
        if spec is None:
            raise UsageError(f"{shown!r}: has no __main__.py; give a script, or -m and a module")
        return _from_spec(spec)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise UsageError(
            f"{shown!r}: cannot be read ({error.strerror}); give the path of a Python script"
        ) from None
    # Python resolves a symbolic link here, so that a script finds the modules beside it.
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    main = ModuleType("__main__")
    main.__file__ = path
    main.__spec__ = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    try:
        code = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        _end_by(error, None)
    return main, code


def _module(name: str) -> tuple[ModuleType, CodeType]:
    """The same from a module's name; a package stands for its __main__."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"-m {name}: {type(error).__name__}: {error}") from error
    if spec is None:
        raise UsageError(f"-m {name}: no such module in {sys.executable}'s path; check the name")
    main, code = _from_spec(spec)
    sys.argv[0] = spec.origin or name
    return main, code


def _from_spec(spec: importlib.machinery.ModuleSpec) -> tuple[ModuleType, CodeType]:
    main = ModuleType("__main__")
    main.__spec__ = spec
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    if spec.origin is not None:
        main.__file__ = spec.origin
    get_code = getattr(spec.loader, "get_code", None)
    try:
        code = get_code(spec.name) if get_code is not None else None
    except SyntaxError as error:
        _end_by(error, None)
    if not isinstance(code, CodeType):
        raise UsageError(f"{spec.name}: is not Python code (it is {spec.origin}); name a module")
    return main, code


def _set_first_path(path: str) -> None:
    # Under `python -m commkit` the first entry is the directory that python itself put there.
    # Under the console script it is the directory of that script.  The user's comes in its place.
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return
    if sys.path:
        sys.path[0] = path
    else:
        sys.path.append(path)


def _execute(main: ModuleType, code: CodeType) -> None:
    main.__dict__["__builtins__"] = builtins
    # It stays there: threads, exit handlers and pickles of the script look into __main__ later.
    sys.modules["__main__"] = main
    try:
        exec(code, main.__dict__)
    except CommkitError:
        raise  # one line and its exit code, like any command; COMMKIT_DEBUG=1 adds the traceback
    except Exception as error:
        _end_by(error, error.__traceback__)
    except KeyboardInterrupt as error:
        _end_by(error, error.__traceback__, EXIT_INTERRUPTED)


def _end_by(error: BaseException, trace: TracebackType | None, code: int = 1) -> NoReturn:
    """Reports the script's exception as the interpreter does, without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    # Set by the interpreter before it calls the hook; exit handlers tell a crash by it.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(type(error), error, trace)
    groups = sys.modules.get("commkit.groups")
    if groups is not None and isinstance(error, RuntimeError):
        # torch's errors of collectives do not say who was waited for.
        for line in groups.incomplete():
            print(f"commkit: {line}", file=sys.stderr)
    raise SystemExit(code)
