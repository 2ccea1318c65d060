"""benchmarks/placement.py as a smoke run: its bars hold, with or without METIS and OR-tools."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.timeout(180)
def test_the_quick_run_holds_its_bars(repository, tmp_path):
    records = tmp_path / "records.jsonl"
    done = subprocess.run(
        [sys.executable, "benchmarks/placement.py", "--quick", "--bars", "--json", records],
        cwd=repository,
        env={"PYTHONPATH": str(repository), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    bars = [line.split() for line in done.stdout.splitlines() if line.startswith("BAR ")]
    assert {"cross_tor_whole_moe", "paths_off_the_bound"} <= {bar[1] for bar in bars}
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    plans = [row for row in rows if row.get("contender") == "plan"]
    assert {row["allocation"] for row in plans} == {"fragmented", "whole ToRs"}
    for row in plans:
        assert row["crossing"][0] >= row["least_crossing"][0] > 0
