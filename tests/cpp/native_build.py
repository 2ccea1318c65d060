"""Compiles native_module.cc with the parts of csrc/ that it tests; needs a C++17 compiler only.

What was built stays in build/native-tests under a hash of everything it was made from.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

NAME = "commkit_native"
ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    "tests/cpp/native_module.cc",
    *(f"csrc/net/{name}.cc" for name in ("address", "crypto", "identity", "peer")),
    *(f"csrc/wire/{name}.cc" for name in ("key_table", "store_session")),
    "csrc/python/net_bindings.cc",
]


def build():
    """The module, compiled if need be."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = [*"-std=c++17 -O1 -g -fPIC -fvisibility=hidden -pthread -Wall -Wextra".split()]
    flags += [*shlex.split(os.environ.get("CXXFLAGS", "")), f"-I{ROOT / 'csrc'}"]
    for path in (sysconfig.get_path("include"), pybind11.get_include()):
        flags += ["-isystem", path]
    inputs = hashlib.sha256(repr((compiler, flags, sys.version)).encode())
    headers = [*ROOT.glob("csrc/net/*.h"), *ROOT.glob("csrc/wire/*.h")]
    for path in sorted([*headers, *(ROOT / source for source in SOURCES)]):
        inputs.update(path.read_bytes())
    directory = ROOT / "build" / "native-tests" / inputs.hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / (NAME + sysconfig.get_config_var("EXT_SUFFIX"))
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _make(target, [*compiler, *flags])
    spec = importlib.util.spec_from_file_location(NAME, target)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    return module


def _make(target: Path, command: list[str]) -> None:
    def compile_one(source: str) -> str:
        made = str(target.parent / (Path(source).stem + ".o"))
        _run([*command, "-c", str(ROOT / source), "-o", made])
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    partial = str(target) + ".part"
    _run([*command, "-shared", *objects, "-o", partial])
    os.replace(partial, target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
