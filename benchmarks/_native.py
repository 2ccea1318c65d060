"""Builds the native programs beside the benchmarks, from the objects that setup.py has made."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "benchmarks" / "native"
BUILT = ROOT / "build" / "benchmarks"


def _newest(paths: list[Path]) -> float:
    return max(path.stat().st_mtime for path in paths)


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


AGENT = ("net", "wire", "overlay")


def program(name: str, parts: Sequence[str] = AGENT) -> Path:
    """Path of what native/NAME.cc and parts of csrc/ make; `make native` must have run."""
    built = ROOT / "build" / "obj" / "csrc"
    objects = sorted(path for part in parts for path in (built / part).glob("*.o"))
    objects = [path for path in objects if not path.stem.endswith("_main")]
    if not objects:
        sys.exit("benchmarks: no objects under build/obj; run `make native` first")
    made = BUILT / name
    needs = [SOURCES / f"{name}.cc", *SOURCES.glob("*.h"), *objects]
    if not made.exists() or made.stat().st_mtime < _newest(needs):
        BUILT.mkdir(parents=True, exist_ok=True)
        flags = ["-std=c++17", "-O2", "-pthread", f"-I{ROOT / 'csrc'}", f"-I{SOURCES}"]
        command = [*_compiler(), *flags, str(SOURCES / f"{name}.cc"), *map(str, objects)]
        subprocess.run([*command, "-o", str(made)], check=True)
    return made


def preload(name: str) -> Path:
    """Path of the library made from native/NAME.c, for LD_PRELOAD."""
    made, source = BUILT / f"{name}.so", SOURCES / f"{name}.c"
    if not made.exists() or made.stat().st_mtime < source.stat().st_mtime:
        BUILT.mkdir(parents=True, exist_ok=True)
        command = [*shlex.split(os.environ.get("CC", "cc")), "-shared", "-fPIC", "-O2", str(source)]
        subprocess.run([*command, "-o", str(made), "-ldl"], check=True)
    return made
