#!/usr/bin/env python3
"""Runs Python with torch's CUDA build on the rig: rig.py ARGUMENTS of the interpreter.

    tests/nccl_rig/rig.py -m pytest tests/nccl_rig
    NCCL_RIG_SPLIT_MS=1 tests/nccl_rig/rig.py train.py

torch and its environment are those of tests/torch_matrix.py.  Whatever the program starts runs on
the rig too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "nccl_rig")]

import rig_build  # noqa: E402
import torch_matrix  # noqa: E402

#: Set for what runs on the rig.
VARIABLE = "NCCL_RIG"


def active() -> bool:
    """Whether this process runs on the rig."""
    return os.environ.get(VARIABLE) == "1"


def variables() -> dict[str, str]:
    """What turns a process of torch's CUDA build into one on the rig."""
    preload = [*map(str, rig_build.libraries()), *filter(None, [os.environ.get("LD_PRELOAD")])]
    return {VARIABLE: "1", "LD_PRELOAD": ":".join(preload)}


def interpreter() -> Path:
    """Python with torch's CUDA build; it is fetched where it is missing."""
    return torch_matrix.environment(torch_matrix.NEWEST, torch_matrix.ROOT / "build" / "torch")


def main() -> int:
    try:
        python = interpreter()
    except subprocess.CalledProcessError as error:
        if os.environ.get("CI") == "true":
            raise
        print(f"skipped: torch {torch_matrix.NEWEST} cannot be installed: {error}", file=sys.stderr)
        return 0
    os.execve(python, [str(python), *sys.argv[1:]], {**os.environ, **variables()})


if __name__ == "__main__":
    sys.exit(main())
