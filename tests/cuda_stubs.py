"""Stubs for the CUDA libraries that PyPI's torch links, so that it can be imported without them.

torch's default wheels need some 3 GB of NVIDIA's libraries merely to be imported, and call none of
them before CUDA is initialised.  A stub has the library's name, its symbol version and the
functions that torch refers to; each returns cudaErrorNoDevice.  What is tested with them is torch's
own code for CPUs; torch sees no GPU.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

#: Libraries whose absence is mended; anything else that is missing stays an error.
_NVIDIA = re.compile(r"lib(cu|nccl|nv)\w*\.so[.\d]*")
_SYMBOLS = re.compile(r"(__cuda|cu|nccl|nv)\w*")
_NO_DEVICE = 100


def _read(*command: object) -> str:
    return subprocess.run(
        list(map(str, command)), check=True, capture_output=True, text=True
    ).stdout


def _missing(libraries: list[Path]) -> dict[str, dict[str, set[str]]]:
    """NVIDIA libraries that torch links: their symbol versions, and the functions of each."""
    versions: dict[str, set[str]] = {}
    functions: dict[str, set[str]] = {}
    for library in libraries:
        file = ""
        for line in _read("readelf", "-d", "-V", library).splitlines():
            if "(NEEDED)" in line:
                versions.setdefault(line.partition("[")[2].rstrip("]"), set())
            elif found := re.search(r"Version: 1  File: (\S+)", line):
                file = found[1]
            elif found := re.search(r"  Name: (\S+)  Flags:", line):
                versions.setdefault(file, set()).add(found[1])
        for line in _read("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if _SYMBOLS.fullmatch(name):
                functions.setdefault(version.strip("@"), set()).add(name)
    names = sorted(name for name in versions if _NVIDIA.fullmatch(name))
    wanted = {name: {v: functions.get(v, set()) for v in sorted(versions[name])} for name in names}
    if names:
        # Where the library gives its symbols no version, any of them may be the one.
        wanted[names[0]][""] = functions.get("", set())
    return wanted


def make(torch: Path, compiler: str = "c++") -> list[str]:
    """Puts stubs beside the libraries of the installed package `torch`; returns their names."""
    directory = torch / "lib"
    missing = _missing([*directory.glob("*.so*"), *torch.glob("_C*.so")])
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "stub.cc"), Path(scratch, "stub.map")
        for name, versions in missing.items():
            every = sorted(set().union(*versions.values()))
            source.write_text(
                "".join(f'extern "C" long {f}() {{ return {_NO_DEVICE}; }}\n' for f in every)
            )
            script.write_text(
                "".join(
                    f"{version} {{ global: {' '.join(f'{f};' for f in sorted(names))} }};\n"
                    for version, names in versions.items()
                    if version
                )
            )
            command = [*shlex.split(compiler), "-shared", "-fPIC", "-O0", f"-Wl,-soname,{name}"]
            if script.stat().st_size:
                command.append(f"-Wl,--version-script={script}")
            _read(*command, "-o", directory / name, source)
    return list(missing)


if __name__ == "__main__":
    print(*make(Path(sys.argv[1])), sep="\n")
