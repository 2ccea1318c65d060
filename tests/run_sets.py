"""Runs the tests in two sets side by side, since most tests wait for something: make test.

The sets do not meet: the fabric's agents live in network namespaces of their own, and the rest of
the first set starts none.  Arguments go to both.  The first set's output is shown at the end, or
when the run is cut short.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

FIRST = ["tests/unit", "tests/packaging", "tests/fabric"]
SECOND = ["tests/loopback"]
OUTPUT = Path("build/tests-1.txt")


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    OUTPUT.parent.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with OUTPUT.open("w") as output:
        first = subprocess.Popen([*pytest, *FIRST], stdout=output, stderr=subprocess.STDOUT)
        try:
            second = subprocess.run([*pytest, *SECOND]).returncode
            return first.wait() or second
        finally:
            first.terminate()
            first.wait()
            print(OUTPUT.read_text(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
