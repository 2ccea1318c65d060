"""Everything here needs the rig: make test-nccl."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "loopback")]

import rig  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if rig.active():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="runs on the rig only: make test-nccl"))
