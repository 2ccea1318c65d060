"""benchmarks/plan_scale.py as a smoke run: every rank has its ids, and the counters are bounded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.timeout(240)  # compiles two programs
def test_simulated_ranks_exchange_the_ids_of_their_groups(repository, tmp_path):
    records = tmp_path / "records.jsonl"
    command = [sys.executable, "benchmarks/plan_scale.py", "--quick", "--ranks", "64,512"]
    command += ["--stock-ranks", "16", "--stock-groups", "3", "--json", str(records), "--bars"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr
    assert "3 of 40 groups replayed" in done.stdout and "extrapolated" in done.stdout
    assert "BAR overflows_512 0 == 0 ok" in done.stdout
    *rows, stock = (json.loads(line) for line in records.read_text().splitlines())
    assert [row["ranks"] for row in rows] == [64, 512]
    for row in rows:
        assert row["kind"] == "simulated ranks, loopback"
        assert 0 < row["seconds"] <= row["digest_seconds"] <= row["ids_seconds"]
        # One digest up and the word down for each host; ids of pipelines and data parallelism.
        assert row["all_messages"] > 4 * row["hosts"]
    small, large = rows
    # Eight times the ranks: the busiest agent has the ids of more hosts, not eight times as many.
    assert large["busiest_other"]["operations"] < 6 * max(small["root"]["operations"], 1)
    assert stock["seconds"] > stock["groups_seconds"] > 0
    assert (stock["groups"], stock["all_groups"]) == (3, 40)


def test_a_shape_that_is_not_the_world_is_refused(repository):
    script = (
        "import subprocess, sys; sys.path.insert(0, 'benchmarks'); import _native;"
        "sys.exit(subprocess.run([str(_native.program('join')), 'ranks=64', 'tp=8', 'dp=2',"
        " 'pp=2']).returncode)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=repository, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "tp * dp * pp is 32, expected 64 ranks" in done.stderr
