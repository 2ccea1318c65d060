"""benchmarks/join.py as a smoke run: its counters are what the agent tree promises."""

import json
import math
import subprocess
import sys

import pytest


@pytest.mark.timeout(180)  # compiles two programs
def test_simulated_ranks_join_and_no_agent_holds_more_than_its_share(repository, tmp_path):
    records = tmp_path / "records.jsonl"
    command = [sys.executable, "benchmarks/join.py", "--quick", "--tcpstore-up-to", "64"]
    done = subprocess.run(
        [*command, "--json", str(records)], cwd=repository, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert [row["ranks"] for row in rows] == [64, 256]
    for row in rows:
        assert row["kind"] == "simulated ranks, loopback"
        assert row["seconds"] > 0 and row["floor_seconds"] > 0 and row["overflows"] == 0
        # Every other host's agent has contacted the root once.
        assert row["hosts"] - 1 <= row["root"]["accepted_total"] <= row["hosts"] + 64
        assert row["root"]["peak_open"] <= 4 * math.sqrt(row["hosts"]) + 64
        assert row["busiest_other"]["peak_open"] <= row["root"]["peak_open"]
    assert rows[0]["tcpstore_construct_seconds"] > 0 and "tcpstore_construct_seconds" not in rows[1]
