"""Builds once what the packaging tests look at; nothing is built inside the working tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

NOT_COPIED = shutil.ignore_patterns(".*", "dist", "*.egg-info", "__pycache__", "lib.*", "temp.*")


def checked(*command: object, **environment: str) -> str:
    """Standard output of a command that must succeed; a failure shows all that it said."""
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def only(directory: Path, pattern: str) -> Path:
    (found,) = directory.glob(pattern)
    return found


@pytest.fixture(scope="session")
def tree(repository, tmp_path_factory) -> Path:
    """A copy of the working tree with its link and its object files, as a clone would be."""
    copy = tmp_path_factory.mktemp("tree") / "commkit"
    shutil.copytree(repository, copy, symlinks=True, ignore=NOT_COPIED)
    return copy


@pytest.fixture(scope="session")
def sdist(tree) -> Path:
    checked(sys.executable, "-m", "build", "--no-isolation", "--sdist", tree)
    return only(tree / "dist", "*.tar.gz")


@pytest.fixture(scope="session")
def wheel(tree) -> Path:
    """Built from the tree, with the flags of `make`, so that its objects are used again."""
    command = (sys.executable, "-m", "build", "--no-isolation", "--wheel", tree)
    checked(*command, COMMKIT_WERROR="1" if os.environ.get("CI") == "true" else "0")
    return only(tree / "dist", "*.whl")


@pytest.fixture(scope="session")
def python(tmp_path_factory) -> Path:
    """The interpreter of a new virtual environment that holds pip and nothing else."""
    directory = tmp_path_factory.mktemp("venv")
    venv.create(directory, with_pip=True)
    return directory / "bin" / "python"


@pytest.fixture(scope="session")
def wheel_of_sdist(python, sdist, tmp_path_factory) -> Path:
    """Built by pip alone from the sdist, with the declared build requirements only: no torch."""
    out = tmp_path_factory.mktemp("wheel")
    checked(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, sdist, PYTHONPATH="")
    return only(out, "*.whl")


@pytest.fixture(scope="session")
def installed(python, wheel_of_sdist) -> Path:
    """`python`, with commkit and what it requires installed."""
    checked(python, "-m", "pip", "install", "-q", wheel_of_sdist, PYTHONPATH="")
    return python
