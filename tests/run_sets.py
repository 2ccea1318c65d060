"""Runs the tests in sets side by side, since most tests wait for something: make test.

The sets do not meet: the fabric's agents live in network namespaces of their own, the rest of the
first set starts none, and agents of the others know only their own jobs.  Arguments go to all.
Under CI a minute of fuzzing for each harness goes on beside them.  The last set's output is shown
as it comes, that of the others at the end, or when the run is cut short.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

SETS = [
    ["tests/unit", "tests/packaging", "tests/fabric"],
    ["tests/torch_suite"],
    ["tests/loopback"],
]
# The tests beside it have deadlines, so it takes what they leave.
FUZZ = ["nice", "-n", "19", sys.executable, "tests/fuzz/run.py", "--seconds", "60"]
OUTPUT = Path("build")


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    commands = [[*pytest, *tests] for tests in SETS[:-1]]
    if os.environ.get("CI") == "true":
        commands.append(FUZZ)
    OUTPUT.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    files = [OUTPUT / f"tests-{number}.txt" for number in range(1, len(commands) + 1)]
    others = []
    try:
        for command, file in zip(commands, files, strict=True):
            with file.open("w") as output:
                others.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        last = subprocess.run([*pytest, *SETS[-1]]).returncode
        return next(filter(None, [other.wait() for other in others]), last)
    finally:
        for other in others:
            other.terminate()
        for other, file in zip(others, files, strict=False):
            other.wait()
            print(file.read_text(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
