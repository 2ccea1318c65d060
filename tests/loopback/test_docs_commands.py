"""The commands of docs/start.md run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
started = "stock torch" if os.environ.get("COMMKIT_DISABLE") else "commkit"
from commkit import api
assert api.is_initialized() == (started == "commkit")
sys.stdout.write(f"{started}: {int(value)} of {dist.get_world_size()}\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""


def lines():
    text = (ROOT / "docs" / "start.md").read_text()
    block = text.partition("<!-- run -->")[2].partition("<!-- /run -->")[0]
    return [line for line in block.splitlines() if line and not line.startswith("```")]


def commands():
    """Each line as a parameter, named by its words."""
    for line in lines():
        marks = [pytest.mark.mpiexec] if "mpiexec" in line else []
        yield pytest.param(line, id=re.sub(r"\W+", "-", line)[:40], marks=marks)


def test_the_document_has_commands():
    assert len(lines()) >= 5


@pytest.fixture
def shell(tmp_path):
    """Runs a line as a user would, with this run's Python behind the names that it uses."""
    names = {
        "python": "",
        "commkit": "-m commkit",
        "torchrun": "-m torch.distributed.run",
    }
    for name, module in names.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        program.chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)
    path = [tmp_path / "bin", Path(sys.executable).parent, os.environ["PATH"]]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join(map(str, path)),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "COMMKIT_LOG_DIR": str(tmp_path / "logs"),
        "OMP_NUM_THREADS": "1",
    }

    def run(line):
        return subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return run


@pytest.mark.timeout(120)
@pytest.mark.parametrize("line", [*commands()])
def test_a_command_of_the_document_works(shell, line):
    done = shell(line)
    assert done.returncode == 0, done.stderr
    if "train.py" in line:
        world = 1 if "WORLD_SIZE=1" in line else 2
        started = "stock torch" if "COMMKIT_DISABLE" in line else "commkit"
        assert done.stdout.splitlines().count(f"{started}: {world} of {world}") == world
    else:
        assert done.stdout
