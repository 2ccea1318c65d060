"""The fuzz harnesses on the inputs that are kept: those that once failed, and a small corpus.

Built by any compiler, with the address and undefined-behaviour sanitizers; `make fuzz` looks for
new inputs and needs clang.
"""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

# The first test also compiles the agent with the sanitizers.
pytestmark = pytest.mark.timeout(900)

HARNESSES = ("agent", "client", "handshake", "parsers", "store", "stream", "tuner")


@pytest.fixture(scope="module")
def fuzz(repository):
    """Modules of tests/fuzz by name."""
    sys.path.insert(0, str(repository / "tests" / "fuzz"))
    yield importlib.import_module
    sys.path.remove(str(repository / "tests" / "fuzz"))


@pytest.mark.parametrize("harness", HARNESSES)
def test_kept_inputs_do_no_harm(fuzz, harness, tmp_path):
    fuzz("inputs").unpack(harness, tmp_path)
    files = sorted(tmp_path.iterdir())
    assert files, f"tests/fuzz/corpus/{harness}.txt holds inputs"
    program = fuzz("programs").replay(harness)
    done = subprocess.run(
        [program, *files], capture_output=True, text=True, errors="replace", timeout=300
    )
    assert done.returncode == 0, f"{done.stdout[-200:]}\n{done.stderr[-6000:]}"
    assert len(done.stdout.splitlines()) == len(files)


def test_every_harness_is_replayed(fuzz):
    assert fuzz("programs").HARNESSES == HARNESSES
    known = {path.stem for path in fuzz("inputs").KEPT.glob("*.txt")}
    assert known == set(HARNESSES)
    assert {path.name for path in fuzz("inputs").FAILED.iterdir()} <= set(HARNESSES)
