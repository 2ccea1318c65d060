"""Builds commkit-agent with the address and undefined-behaviour sanitizers, once for its sources.

What was built stays in build/native-tests under a hash of everything it was made from.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "-std=c++17 -O1 -g1 -pthread -fno-omit-frame-pointer "
    "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
).split()


def agent() -> Path:
    """The program, compiled if need be."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    sources = [p for part in ("net", "wire", "overlay") for p in ROOT.glob(f"csrc/{part}/*.cc")]
    inputs = hashlib.sha256(repr((compiler, FLAGS)).encode())
    for path in sorted([*sources, *ROOT.glob("csrc/*/*.h")]):
        inputs.update(path.name.encode() + path.read_bytes())
    directory = ROOT / "build" / "native-tests" / f"agent-{inputs.hexdigest()[:16]}"
    directory.mkdir(parents=True, exist_ok=True)
    # The kernel shows a program's file name, and tests look for agents by theirs.
    program = directory / "commkit-agent"
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _make(program, [*compiler, *FLAGS, f"-I{ROOT / 'csrc'}"], sources)
    return program


def _make(program: Path, command: list[str], sources: list[Path]) -> None:
    def compile_one(source: Path) -> str:
        made = str(program.parent / f"{source.parent.name}-{source.stem}.o")
        _run([*command, "-c", str(source), "-o", made])
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sorted(sources)))
    partial = f"{program}.part"
    _run([*command, *objects, "-o", partial])
    os.replace(partial, program)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
