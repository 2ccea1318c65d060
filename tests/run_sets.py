"""Runs the tests in sets side by side, since most tests wait for something: make test.

The sets do not meet: the fabric's agents live in network namespaces of their own, the rest of the
first set starts none, and agents of the others know only their own jobs.  With CI=true the newest
torch is fetched meanwhile, and what depends on torch's version is tested with it after the second
set (torch_matrix.py), then NCCL's process groups on a rig (nccl_rig); a minute of fuzzing for each
harness goes on beside them.  The part of the last set that starts torch most comes after the
second.  Arguments go to pytest.  The last set's output is shown as it comes, that of the others at
the end, or when the run is cut short.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import torch_matrix

FIRST = ["tests/unit", "tests/packaging", "tests/fabric"]
SECOND = ["tests/torch_suite", "tests/frameworks"]
RIG = ["tests/nccl_rig"]
# So that the sets end at about the same time.
TORCH = [
    str(path)
    for kind in ("bench", "groups", "start")
    for path in sorted(Path("tests/loopback").glob(f"test_{kind}*.py"))
]
LAST = ["tests/loopback", *(f"--ignore={path}" for path in TORCH)]
# The tests beside it have deadlines, so it takes what they leave.
FUZZ = ["nice", "-n", "19", sys.executable, "tests/fuzz/run.py", "--seconds", "60"]
BUILD = Path("build")


class Lane(threading.Thread):
    """Commands one after the other, whatever their exit codes; the output goes to a file."""

    def __init__(self, name: str, *commands: list[str]) -> None:
        super().__init__(daemon=True)
        self.output = BUILD / f"tests-{name}.txt"
        self.commands = commands
        self.codes: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.ending = False

    def run(self) -> None:
        with self.output.open("w") as output:
            for command in self.commands:
                if self.ending:
                    return
                self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
                self.codes.append(self.process.wait())

    def end(self) -> None:
        self.ending = True
        if self.process is not None:
            self.process.terminate()
        self.join(30)
        print(self.output.read_text(), flush=True)


def main() -> int:
    arguments = sys.argv[1:]
    pytest = [sys.executable, "-m", "pytest", *arguments]
    matrix = [sys.executable, torch_matrix.__file__, torch_matrix.NEWEST]
    BUILD.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    second = [[*pytest, *SECOND]]
    lanes = []
    if os.environ.get("CI") == "true":
        lanes.append(Lane("fetch", [*matrix, "--install-only"]))
        lanes.append(Lane("fuzz", FUZZ))
        second.append([*matrix, "--", *arguments])  # waits until it has been fetched
        second.append([sys.executable, "tests/nccl_rig/rig.py", *pytest[1:], *RIG])
    second.append([*pytest, *TORCH])
    lanes += [Lane("1", [*pytest, *FIRST]), Lane("2", *second)]
    try:
        for lane in lanes:
            lane.start()
        last = subprocess.run([*pytest, *LAST]).returncode
        for lane in lanes:
            lane.join()
        return next((code for lane in lanes for code in lane.codes if code), last)
    finally:
        for lane in lanes:
            lane.end()


if __name__ == "__main__":
    sys.exit(main())
