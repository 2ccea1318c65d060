"""Compiles the stand-in CUDA runtime and the mock NCCL, once for each content."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "nccl_rig"
WARNINGS = ["-Wall", "-Wextra"]
SHARED = ["-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
#: Their names are those that torch looks for: it opens libcuda.so.1 by name.
CUDA, NCCL = "libcuda.so.1", "libnccl.so.2"


def _compiler(variable: str, default: str) -> list[str]:
    return shlex.split(os.environ.get(variable, "")) or [default]


def _commands(folder: Path) -> list[list[str]]:
    strict = ["-Werror"] if os.environ.get("COMMKIT_WERROR") == "1" else []
    cuda, nccl = folder / CUDA, folder / NCCL
    c = [*_compiler("CC", "cc"), "-std=gnu11", *WARNINGS, *strict, *SHARED]
    cxx = [*_compiler("CXX", "c++"), "-std=c++17", *WARNINGS, *strict, *SHARED]
    return [
        [*c, f"-Wl,-soname,{CUDA}", "-o", str(cuda), *map(str, sorted(HERE.glob("cuda/*.c")))],
        [
            *cxx,
            *(f"-Wl,{option}" for option in (f"-soname,{NCCL}", "-rpath,$ORIGIN")),
            "-o",
            str(nccl),
            *map(str, sorted(HERE.glob("nccl/*.cc"))),
            str(cuda),
        ],
    ]


def libraries() -> list[Path]:
    """The two libraries, in the order in which they are to be loaded."""
    content = hashlib.sha256(repr(_commands(Path("x"))).encode())
    for source in sorted([*HERE.glob("cuda/*"), *HERE.glob("nccl/*")]):
        content.update(f"{source.name}\0".encode() + source.read_bytes())
    folder = BUILD / content.hexdigest()[:16]
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second waits for the first
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            for command in _commands(part):
                subprocess.run(command, check=True)
            part.rename(folder)
    return [folder / CUDA, folder / NCCL]


if __name__ == "__main__":
    print(*libraries(), sep="\n")
    sys.exit(0)
