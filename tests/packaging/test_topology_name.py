"""In the repository topology/ lies on the path: it must not become a second copy of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture
def python(repository):
    def run(script):
        command = [sys.executable, "-c", script]
        return subprocess.run(command, cwd=repository, capture_output=True, text=True)

    return run


def test_topology_is_importable_as_part_of_commkit(python):
    done = python("import commkit.topology as t; print(t.__name__)")
    assert (done.returncode, done.stdout) == (0, "commkit.topology\n"), done.stderr


@pytest.mark.parametrize("name", ["topology", "topology.hostlist"])
def test_importing_it_under_another_name_says_the_right_one(python, name):
    done = python(f"import {name}")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "commkit.topology" in last
