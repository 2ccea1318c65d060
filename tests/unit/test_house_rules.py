"""The rules of tests/conftest.py hold: they are tried on small test files of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

SKIPPING = """
import pytest

def test_runs(): pass

@pytest.mark.parametrize("n", [1, 2])
def test_skips(n): pytest.skip("no GPU here")

@pytest.mark.xfail(reason="known")
def test_expected_failure(): assert False
"""

MODULE_SKIP = "import pytest; pytest.importorskip('no_such_module_at_all')\ndef test_runs(): pass\n"


@pytest.fixture
def outcome(tmp_path, repository):
    """Run pytest on one file beside a copy of the real conftest: (exit code, output)."""

    def run(test, allowed="", ci="true"):
        shutil.copy(repository / "tests" / "conftest.py", tmp_path)
        (tmp_path / "allowed_skips.txt").write_text(allowed)
        (tmp_path / "test_it.py").write_text(test)
        (tmp_path / "pytest.ini").write_text(
            "[pytest]\nfilterwarnings = error\nmarkers =\n  fabric: x\n  mpiexec: x\n"
        )
        environment = {**os.environ, "CI": ci, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_skip_fails_the_run_under_ci(outcome):
    code, output = outcome(SKIPPING)
    assert code == 1
    assert "SKIP IS A FAILURE UNDER CI: test_it.py::test_skips[1]: Skipped: no GPU" in output
    assert "test_expected_failure:" not in output


def test_a_skip_is_fine_without_ci(outcome):
    assert outcome(SKIPPING, ci="")[0] == 0


def test_a_listed_skip_is_fine_under_ci(outcome):
    assert outcome(SKIPPING, "# why\ntest_it.py::test_skips* | no GPU in CI\n")[0] == 0


def test_a_listed_skip_covers_no_other(outcome):
    code, output = outcome(SKIPPING, "test_it.py::test_skips[1] | no GPU in CI\n")
    assert code == 1
    assert "test_skips[2]" in output
    assert "UNDER CI: test_it.py::test_skips[1]" not in output


def test_a_listed_skip_needs_a_reason(outcome):
    code, output = outcome(SKIPPING, "test_it.py::test_skips*\n")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "tests/allowed_skips.txt:1: 'test_it.py::test_skips*': expected" in output


def test_a_skipped_module_fails_the_run_under_ci(outcome):
    code, output = outcome(MODULE_SKIP)
    assert code != 0
    assert "SKIP IS A FAILURE UNDER CI: test_it.py" in output


def test_a_child_left_behind_fails_the_test_and_is_ended(outcome):
    code, output = outcome(
        "import subprocess, conftest\n"
        "conftest.GRACE_SECONDS = 0.1\n"
        "def test_leaves():\n"
        "    global child; child = subprocess.Popen(['sleep', '500'])\n"
        "def test_it_was_killed(): assert child.wait(timeout=10) == -9\n"
    )
    assert code == 1
    assert "(sleep 500)" in output
    assert "1 passed, 1 error" in output or "2 passed, 1 error" in output


def test_an_agent_in_its_own_session_left_behind_fails_the_test(outcome, tmp_path):
    # The real agent is a child of nobody in the test: it is known by its name and environment.
    agent = tmp_path / "commkit-agent"
    shutil.copy(shutil.which("sleep"), agent)
    start = f"import subprocess as s; s.Popen([{str(agent)!r}, '500'], start_new_session=True)"
    code, output = outcome(
        "import subprocess, sys, conftest\n"
        "conftest.GRACE_SECONDS = 0.1\n"
        "def test_leaves():\n"
        f"    subprocess.run([sys.executable, '-c', {start!r}], stdout=subprocess.DEVNULL)\n"
    )
    assert code == 1
    assert f"({agent} 500)" in output
