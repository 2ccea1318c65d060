"""Another version of commkit, made of this one: the same code with another protocol version.

Only csrc/net/version.cc is compiled again; the rest is linked from the objects of `make native`.
"""

from __future__ import annotations

import fcntl
import hashlib
import shlex
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = ROOT / "build" / "obj"
VERSION = "build/obj/csrc/net/version.o"

RELEASE, PROTOCOL = "9.9.9", 999
DEFINES = [f"-DCOMMKIT_PROTOCOL_VERSION={PROTOCOL}", f'-DCOMMKIT_RELEASE="{RELEASE}"']


def _command(target: Path) -> list[str]:
    """How setup.py has made `target`, without its -o."""
    return shlex.split(target.with_name(target.name + ".cmd").read_text().splitlines()[1])


def package_path() -> Path:
    """A directory for PYTHONPATH that holds the other version's package `commkit`."""
    [module] = OBJECTS.glob("_C.*.so")
    programs = [module, OBJECTS / "commkit-agent"]
    inputs = hashlib.sha256(repr(DEFINES).encode())
    for path in [*programs, *sorted((ROOT / "commkit").rglob("*.py"))]:
        inputs.update(path.read_bytes())
    directory = ROOT / "build" / "native-tests" / f"other-{inputs.hexdigest()[:16]}"
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "done").exists():
            _make(directory, programs)
            (directory / "done").touch()
    return directory


def _make(directory: Path, programs: list[Path]) -> None:
    version = str(directory / "version.o")
    command = _command(ROOT / VERSION)
    command[command.index("-MF") + 1] = str(directory / "version.d")
    _run([*command, *DEFINES, "-o", version])
    package = directory / "commkit"
    shutil.rmtree(package, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "_C.*.so", "commkit-agent")
    shutil.copytree(ROOT / "commkit", package, ignore=ignored)
    for program in programs:
        command = _command(program)
        command[command.index(VERSION)] = version
        _run([*command, "-o", str(package / program.name)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
