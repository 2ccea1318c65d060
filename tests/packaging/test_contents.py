"""What the sdist and the wheel hold, and what they do not."""

from __future__ import annotations

import os
import re
import stat
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)  # the first test that needs a wheel compiles it


def package_files(repository: Path) -> set[str]:
    """The package's sources as a user must get them, the linked subpackage included."""
    found = set()
    for directory, _, files in os.walk(repository / "commkit", followlinks=True):
        for name in files:
            if name.endswith((".py", ".pyi", ".typed")):
                found.add(str(Path(directory, name).relative_to(repository)))
    return found


@pytest.fixture
def members(wheel) -> dict[str, zipfile.ZipInfo]:
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info for info in archive.infolist()}


@pytest.fixture
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_the_package_and_nothing_else(members, repository):
    mine = {name for name in members if ".dist-info/" not in name}
    native = {name for name in mine if re.fullmatch(r"commkit/_C\..*\.so", name)}
    assert len(native) == 1
    made = {"commkit/commkit-agent", "commkit/libnccl-tuner-commkit.so"}
    assert mine - native - made == package_files(repository)


def test_the_wheel_holds_the_typing_contract_of_the_native_module(members):
    assert {"commkit/py.typed", "commkit/_C.pyi"} <= set(members)


def test_the_linked_subpackage_is_made_of_regular_files(members):
    topology = [info for name, info in members.items() if name.startswith("commkit/topology/")]
    assert len(topology) >= 2
    assert all(stat.S_ISREG(info.external_attr >> 16) for info in topology)


def test_the_agent_is_an_executable(members, wheel):
    mode = members["commkit/commkit-agent"].external_attr >> 16
    assert mode & 0o111 == 0o111
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("commkit/commkit-agent")[:4] == b"\x7fELF"


def test_the_wheel_is_for_this_platform_and_python(wheel):
    assert not wheel.name.endswith("-none-any.whl")


def test_what_not_everybody_needs_is_an_extra(metadata):
    requirements = metadata.get_all("Requires-Dist")
    always = {re.match(r"\w+", line).group() for line in requirements if "extra ==" not in line}
    assert always == {"click", "rich"}
    assert any(re.fullmatch(r"torch>=2\.6; extra == .torch.", line) for line in requirements)
    assert any(re.match(r"mpi4py\b.*; extra == .mpi.", line) for line in requirements)
    assert any(re.match(r"PyYAML\b.*; extra == .topology.", line) for line in requirements)
    assert any(re.match(r"matplotlib\b.*; extra == .draw.", line) for line in requirements)


def test_the_licence_is_named_and_inside(metadata, members):
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("/LICENSE") for name in members)


def test_the_sdist_and_the_tree_give_the_same_wheel(members, wheel_of_sdist):
    with zipfile.ZipFile(wheel_of_sdist) as archive:
        assert set(archive.namelist()) == set(members)


@pytest.fixture
def sources(sdist) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(sdist) as archive:
        return {info.name.partition("/")[2]: info for info in archive.getmembers()}


def test_the_sdist_holds_all_that_the_build_reads(sources, repository):
    native = {str(path.relative_to(repository)) for path in (repository / "csrc").rglob("*.[ch]*")}
    assert native
    needed = native | package_files(repository) | {"setup.py", "pyproject.toml", "LICENSE"}
    assert not needed - set(sources)


def test_the_sdist_holds_no_link_no_test_and_nothing_built(sources):
    assert all(info.isfile() or info.isdir() for info in sources.values())
    wrong = re.compile(r"(tests|benchmarks|topology|build|docs)(/|$)|.*(\.so|\.o|commkit-agent)$")
    assert not [name for name in sources if wrong.match(name)]
