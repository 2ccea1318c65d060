"""Runs the programs of this directory on stock torch and through commkit."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Cases:
    """Cases of one program, which runs all of them when the first is asked for.

    A case that pytest tries again, since it has failed, is run once more by itself.
    """

    def __init__(self, program, arguments, names, directory, *, commkit, start, each):
        self._run = functools.partial(run, program, *arguments, each, commkit=commkit)
        self._names, self._directory, self._start, self._each = names, directory, start, each
        self._found = None

    def ranks(self, name, request):
        """What the ranks of a case have returned."""
        again = getattr(request.node, "execution_count", 1) > 1
        if self._found is None or again:
            names = [name] if again else self._names
            seconds = self._start + self._each * len(names)
            found = self._run(*names, log_dir=self._directory, deadline=seconds)
            self._found = {**(self._found or {}), **found}
        ranks = self._found[name]
        assert isinstance(ranks, list), f"{ranks}\n{logs(self._directory)}"
        return ranks


def logs(directory):
    """The end of what programs have written to standard error."""
    texts = [f"{path.name}:\n{path.read_text()[-6000:]}" for path in Path(directory).glob("*.txt")]
    return "\n".join(texts)


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
