"""Runs what depends on torch's version with several torches, and prints a table: make matrix.

Each version gets an environment of its own under --where, in which only torch is new: everything
else comes from the environment that runs this program.  The NVIDIA libraries that PyPI's torch
links are stubs (cuda_stubs.py), so that a version costs one download of 0.5 to 0.9 GB.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import cuda_stubs

ROOT = Path(__file__).resolve().parent.parent
#: Oldest that pyproject.toml allows, some between, and the newest that is known to work.
VERSIONS = ("2.6.0", "2.8.0", "2.10.0", "2.13.0", "2.14.1")
NEWEST = VERSIONS[-1]
TESTS = ("api", "store_agent", "store_torch", "run", "patch", "rendezvous", "launch_torchrun")
#: With the newest the rig's tests create groups in all ways.
TESTS_OF_OLDER = (*TESTS, "groups")


@dataclass(frozen=True, slots=True)
class Result:
    version: str
    torch: str  # as it calls itself
    outcome: str  # pytest's counts
    failed: tuple[str, ...]
    installed: float  # seconds
    tested: float  # seconds

    @property
    def good(self) -> bool:
        return not self.failed and "passed" in self.outcome


def _torch_of(python: Path | str) -> str:
    show = "import torch; print(torch.__version__)"
    done = subprocess.run([python, "-c", show], capture_output=True, text=True)
    return done.stdout.strip()


def environment(version: str, where: Path) -> Path:
    """The interpreter of an environment with that torch, made if need be."""
    where.mkdir(parents=True, exist_ok=True)
    with open(where / f"{version}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second waits for the first
        return _environment(version, where / version)


def _environment(version: str, directory: Path) -> Path:
    python = directory / "bin" / "python"
    if (directory / "ready").exists():
        return python
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "--no-deps", f"torch=={version}"], check=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    cuda_stubs.make(packages / "torch", os.environ.get("CXX", "c++"))
    # After its own, so that torch is its own; addsitedir also reads the .pth files in there.
    shared = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "shared.pth").write_text(shared)
    (directory / "ready").touch()
    return python


def _tests(version: str) -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for word in (TESTS if version == NEWEST else TESTS_OF_OLDER)
        for path in sorted(ROOT.glob(f"tests/loopback/test_{word}*.py"))
    ]


def run(version: str, where: Path, arguments: list[str]) -> Result:
    start = time.monotonic()
    here = _torch_of(sys.executable)
    python: Path | str = sys.executable
    if here.partition("+")[0] != version:
        python = environment(version, where)
    torch = _torch_of(python)
    installed = time.monotonic() - start
    where.mkdir(parents=True, exist_ok=True)
    output = where / f"{version}.txt"
    with output.open("w") as file:
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *arguments,
            *_tests(version),
        ]
        subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    text = output.read_text()
    failed = tuple(re.findall(r"^(?:FAILED|ERROR) (.*)$", text, re.MULTILINE))
    last = re.findall(r"^=* ?((?:\d+ \w+(?:, )?)+) in [\d.]+s", text, re.MULTILINE)
    outcome = last[-1] if last else f"no result, see {output}"
    tested = time.monotonic() - start - installed
    return Result(version, torch or "does not import", outcome, failed, installed, tested)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and pytest's behind the `--`."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog="What follows -- goes to pytest."
    )
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="default: %(default)s")
    parser.add_argument("--where", type=Path, default=ROOT / "build" / "torch")
    parser.add_argument("--install-only", action="store_true")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what runs below as well
    mine, arguments = _split(sys.argv[1:])
    options = parser.parse_args(mine)
    options.where = options.where.resolve()
    if options.install_only:
        for version in options.versions:
            environment(version, options.where)
        return 0
    print(
        f"{date.today()}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} cores; tests of {', '.join(TESTS_OF_OLDER)}",
        flush=True,
    )
    print(f"{'torch':<9} {'calls itself':<14} {'install s':>9} {'tests s':>8}  result", flush=True)
    results = []
    for version in options.versions:
        result = run(version, options.where, arguments)
        results.append(result)
        print(
            f"{version:<9} {result.torch:<14} {result.installed:9.0f} {result.tested:8.0f}  "
            f"{result.outcome}",
            flush=True,
        )
        if not result.good:
            print((options.where / f"{version}.txt").read_text()[-20000:], flush=True)
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
