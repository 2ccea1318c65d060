"""Builds commkit._C, commkit-agent and NCCL's tuner plugin from csrc/.

Needs pybind11 and a compiler of C++17 and C11, no torch.  The first two are made of the same
objects, each compiled once, two at a time, and only when its source, a header of csrc/ or the
command has changed; `python setup.py build_ext --inplace` is therefore quick.  CXX, CXXFLAGS,
CFLAGS and LDFLAGS are honoured; COMMKIT_WERROR=1 makes warnings errors.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

JOBS = 2
SHARED = ("csrc/net", "csrc/wire", "csrc/overlay")
EXTENSION = "commkit._C"
AGENT = "commkit.commkit-agent"
TUNER = "commkit.libnccl-tuner-commkit"


def sources_in(*directories: str) -> list[str]:
    """The .cc files of `directories`, without those that hold a main()."""
    found = (path for directory in directories for path in sorted(Path(directory).glob("*.cc")))
    return [str(path) for path in found if not path.name.endswith("_main.cc")]


def compiler() -> list[str]:
    wanted = os.environ.get("CXX", "")
    for command in [shlex.split(wanted)] if wanted else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    tried = f"CXX={wanted!r}" if wanted else "c++, g++, clang++"
    raise CompileError(
        f"no C++ compiler (tried {tried}); install one with C++17 (Debian: g++) or set CXX"
    )


def include_directories() -> list[str]:
    try:
        import pybind11  # here, since making an sdist does without
    except ImportError as error:
        raise CompileError(f"{error}; pip install pybind11, or build with pip") from error
    python = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(python, "Python.h")):
        raise CompileError(
            f"no Python.h in {python}; install this Python's headers (Debian: python3-dev)"
        )
    return [python, pybind11.get_include()]


class Objects:
    """Object files under build/obj, remade when what they were made from has changed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.compiler = compiler()
        flags = ["-O2", "-g", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
        if os.environ.get("COMMKIT_WERROR") == "1":
            flags.append("-Werror")
        c_flags = ["-std=c11", *flags, *shlex.split(os.environ.get("CFLAGS", "")), "-Icsrc"]
        self.compile_c = [*self.compiler, "-x", "c", "-D_GNU_SOURCE", *c_flags]
        flags = ["-std=c++17", *flags, *shlex.split(os.environ.get("CXXFLAGS", "")), "-Icsrc"]
        # -isystem: warnings of headers that are not ours are not ours to fix.
        for path in include_directories():
            flags += ["-isystem", path]
        self.compile = [*self.compiler, *flags]
        self.link_flags = ["-pthread", *shlex.split(os.environ.get("LDFLAGS", ""))]
        version = subprocess.run([*self.compiler, "--version"], capture_output=True, text=True)
        self.version = version.stdout.partition("\n")[0]

    def object_of(self, source: str) -> Path:
        return self.directory / Path(source).with_suffix(".o")

    def make(self, sources: list[str]) -> list[Path]:
        with ThreadPoolExecutor(JOBS) as pool:
            return list(pool.map(self._object, sources))

    def link(self, target: Path, objects: list[Path], *flags: str) -> Path:
        command = [*self.compiler, *flags, *map(str, objects), *self.link_flags]
        self._make(target, command, [str(path) for path in objects])
        return target

    def _object(self, source: str) -> Path:
        target = self.object_of(source)
        dependencies = target.with_suffix(".d")
        compile = self.compile_c if source.endswith(".c") else self.compile
        command = [*compile, "-MMD", "-MF", str(dependencies), "-c", source]
        try:
            _, _, listed = dependencies.read_text().replace("\\\n", " ").partition(":")
            known = [source, *listed.split()]
        except FileNotFoundError:
            known = []
        self._make(target, command, known)
        return target

    def _make(self, target: Path, command: list[str], inputs: list[str]) -> None:
        """Run `command -o target` unless `target` is newer than `inputs` and made by it."""
        stamp = target.with_name(target.name + ".cmd")
        recipe = f"{self.version}\n{shlex.join(command)}\n"
        try:
            made = target.stat().st_mtime_ns
            current = bool(inputs) and stamp.read_text() == recipe
            if current and all(os.stat(path).st_mtime_ns < made for path in inputs):
                return
        except FileNotFoundError:
            pass
        target.parent.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)  # an interrupted run must not look finished
        partial = target.with_name(target.name + ".part")
        print(f"{target}\n", end="", flush=True)
        start = time.time_ns()
        started = subprocess.run([*command, "-o", str(partial)])
        if started.returncode != 0:
            raise CompileError(f"{shlex.join(command)} failed (exit {started.returncode})")
        # As old as the start of the command: what is edited meanwhile is made again.
        os.utime(partial, ns=(start, start))
        os.replace(partial, target)
        stamp.write_text(recipe)


class BuildExt(build_ext):
    """What Python does not import is handled as extensions too: wheels and --inplace know it."""

    objects: Objects | None = None

    def run(self) -> None:
        directory = Path("build", "obj")
        directory.mkdir(parents=True, exist_ok=True)
        # Two builds in one tree take turns; objects appear under their names when complete.
        with open(directory / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.objects = Objects(directory)
            super().run()

    def get_ext_filename(self, fullname: str) -> str:
        name: str = super().get_ext_filename(fullname)
        for own, suffix in ((AGENT, ""), (TUNER, ".so")):
            if fullname in (own, own.rpartition(".")[2]):
                return name[: -len(sysconfig.get_config_var("EXT_SUFFIX"))] + suffix
        return name

    def build_extension(self, ext: Extension) -> None:
        assert self.objects is not None
        if not ext.sources:
            raise CompileError(f"{ext.name}: no sources under csrc/; is the tree complete?")
        objects = self.objects.make(list(ext.sources))
        # Started for every host and job: an agent should not spend its start on linking libstdc++.
        alone = ("-static-libstdc++", "-static-libgcc")
        # NCCL loads the tuner into processes of any kind: it needs the C library alone.
        flags = alone if ext.name == AGENT else ("-shared", "-Wl,--as-needed")
        target = Path(self.get_ext_fullpath(ext.name))
        linked = self.objects.link(self.objects.directory / target.name, objects, *flags)
        target.parent.mkdir(parents=True, exist_ok=True)
        place(linked, target)

    def copy_extensions_to_source(self) -> None:
        assert self.objects is not None
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(self.get_ext_fullname(ext.name)))
            place(built, Path("commkit", built.name))


def place(source: Path, target: Path) -> None:
    """Copy unless equal; by renaming, since `target` may be mapped or running."""
    new = source.stat()
    if target.exists():
        old = target.stat()
        if (old.st_size, old.st_mtime_ns) == (new.st_size, new.st_mtime_ns):
            return
    partial = target.with_name(target.name + ".part")
    shutil.copy2(source, partial)
    os.replace(partial, target)


if __name__ == "__main__":
    shared = sources_in(*SHARED)
    setup(
        ext_modules=[
            Extension(EXTENSION, sources=[*shared, *sources_in("csrc/python")], language="c++"),
            Extension(AGENT, sources=[*shared, "csrc/overlay/agent_main.cc"], language="c++"),
            Extension(TUNER, sources=sorted(map(str, Path("csrc/tuner").glob("*.c")))),
        ],
        cmdclass={"build_ext": BuildExt},
    )
