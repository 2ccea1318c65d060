"""Runs the programs of this directory on stock torch and through commkit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def run(program, *arguments, commkit, log_dir, deadline, env=None):
    """The result that a program prints in its last line; fails with its output if it fails."""
    command = [sys.executable, *(["-m", "commkit", "run"] if commkit else [])]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    output = Path(log_dir) / f"{Path(program).stem}-{'commkit' if commkit else 'stock'}.txt"
    with output.open("w") as errors:
        done = subprocess.run(
            [*command, str(HERE / program), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "PYTHONWARNINGS": "ignore",
                "OMP_NUM_THREADS": "1",
                "COMMKIT_LOG_DIR": str(log_dir),
                "TMPDIR": str(log_dir),
                **(env or {}),
            },
            timeout=deadline,
            text=True,
        )
    said = output.read_text()
    assert done.returncode == 0, f"{' '.join(command)} {program}:\n{said[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])
