"""commkit as pip installs it into an environment that has no torch."""

from __future__ import annotations

import os
import subprocess

import pytest

from commkit.version import VERSION

pytestmark = pytest.mark.timeout(900)  # the first test builds and installs


@pytest.fixture
def run(installed, tmp_path):
    """Run a command of the installed environment, away from the repository."""

    def command(program, *arguments):
        environment = {"PATH": f"{installed.parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
        return subprocess.run(
            [installed.parent / program, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )

    return command


def test_there_is_no_torch_in_this_environment(run):
    assert "ModuleNotFoundError" in run("python", "-c", "import torch").stderr


def test_the_command_tells_its_version(run):
    done = run("commkit", "--version")
    assert (done.returncode, done.stdout) == (0, f"commkit {VERSION}\n"), done.stderr


def test_the_module_is_the_command(run):
    done = run("python", "-m", "commkit", "--version")
    assert (done.returncode, done.stdout) == (0, f"commkit {VERSION}\n"), done.stderr


def test_env_explains_the_environment_without_torch(run):
    done = run("commkit", "env")
    assert done.returncode == 0, done.stderr
    assert "world_size" in done.stdout.replace(" ", "_")


def test_the_bench_names_what_is_missing_in_one_line(run):
    done = run("commkit", "bench", "all_reduce")
    assert done.returncode == 3
    assert "no PyTorch" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_native_module_loads_without_torch(run):
    script = (
        "import hashlib, sys; from commkit import _C;"
        "assert _C.sha256(b'commkit') == hashlib.sha256(b'commkit').digest();"
        "assert 'torch' not in sys.modules"
    )
    done = run("python", "-c", script)
    assert done.returncode == 0, done.stderr


def test_the_agent_keeps_its_executable_bit(run):
    script = "import commkit; print(commkit.__path__[0])"
    directory = run("python", "-c", script).stdout.strip()
    assert os.access(os.path.join(directory, "commkit-agent"), os.X_OK)


def test_the_linked_subpackage_is_importable_under_its_name_only(run):
    right = run("python", "-c", "import commkit.topology.hostlist")
    assert right.returncode == 0, right.stderr
    wrong = run("python", "-c", "import topology")
    assert "ModuleNotFoundError" in wrong.stderr
