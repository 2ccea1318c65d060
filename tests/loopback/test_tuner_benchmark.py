"""benchmarks/tuner_lookup.py as a smoke run."""

import json
import subprocess
import sys

import pytest


@pytest.mark.timeout(120)  # compiles a program
def test_half_of_the_calls_find_a_row(repository, tmp_path):
    records = tmp_path / "records.jsonl"
    command = [sys.executable, "benchmarks/tuner_lookup.py", "--quick", "--json", str(records)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert [row["rows"] for row in rows] == [10, 1000]
    for row in rows:
        assert row["nanoseconds"] > 0
        assert 0.4 < row["chosen"] / row["calls"] < 0.6
