"""Builds programs of csrc/ and of a test's own C++, with sanitizers; needs a C++17 compiler only.

Objects and programs stay in build/native-tests under a hash of what they were made from, so two
programs with the same flags share their objects.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "native-tests"
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
THREAD = ("-fsanitize=thread",)


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def agent_sources(*, main: bool) -> list[Path]:
    """All of the agent and of the rank's side of it; `main`: with commkit-agent's main()."""
    found = (p for part in ("net", "wire", "overlay") for p in ROOT.glob(f"csrc/{part}/*.cc"))
    return sorted(p for p in found if main or not p.name.endswith("_main.cc"))


def tuner_sources() -> list[Path]:
    """NCCL's tuner plugin, which is C."""
    return sorted(ROOT.glob("csrc/tuner/*.c"))


def build(
    name: str,
    sources: Iterable[Path],
    flags: Sequence[str],
    *,
    link: Sequence[str] = (),
    command: Sequence[str] | None = None,
) -> Path:
    """The program `name`, compiled and linked with `flags` (and `link`) if need be."""
    start = [*(command or compiler()), "-std=c++17", "-O1", "-g1", "-pthread"]
    start += ["-fno-omit-frame-pointer", *flags]
    compile_ = [*start, "-Wall", "-Wextra", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}"]
    compile_c = [word if word != "-std=c++17" else "-std=c11" for word in compile_]
    compile_c[1:1] = ["-x", "c", "-D_GNU_SOURCE"]
    version = subprocess.run([*start[:1], "--version"], capture_output=True, check=True).stdout
    start_key = hashlib.sha256(repr(compile_).encode() + version)
    for path in sorted(ROOT.glob("csrc/*/*.h")):
        start_key.update(path.name.encode() + path.read_bytes())

    def compile_one(source: Path) -> Path:
        key = start_key.copy()
        if ROOT / "tests" in source.parents:
            for path in sorted(ROOT.glob("tests/*/*.h")):
                key.update(path.name.encode() + path.read_bytes())
        key.update(str(source.relative_to(ROOT)).encode() + source.read_bytes())
        made = CACHE / "objects" / f"{source.stem}-{key.hexdigest()[:20]}.o"
        command = compile_c if source.suffix == ".c" else compile_
        return _make(made, [*command, "-c", str(source)])

    (CACHE / "objects").mkdir(parents=True, exist_ok=True)
    # One build at a time with these flags: two would compile the same objects.
    flavour = hashlib.sha256(repr(start).encode()).hexdigest()[:16]
    with open(CACHE / f"{flavour}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(2) as pool:
            objects = [str(path) for path in pool.map(compile_one, sorted(sources))]
        key = hashlib.sha256(repr((start, link, objects)).encode()).hexdigest()[:16]
        # The kernel shows a program's file name, and tests look for agents by theirs.
        directory = CACHE / f"{name}-{key}"
        directory.mkdir(exist_ok=True)
        return _make(directory / name, [*start, *objects, *link])


def _make(target: Path, command: list[str]) -> Path:
    if not target.exists():
        partial = f"{target}.part"
        done = subprocess.run([*command, "-o", partial], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
        os.replace(partial, target)
    return target
