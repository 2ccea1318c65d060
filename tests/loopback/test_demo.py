"""The demo runs as a reader would run it, and says what its numbers are of."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(120)
def test_the_demo_compares_start_ups_and_sweeps(tmp_path, repository):
    records = tmp_path / "records.jsonl"
    done = subprocess.run(
        [
            *(sys.executable, str(repository / "benchmarks" / "demo.py")),
            *("--quick", "--bars", "--json", str(records)),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(repository), "COMMKIT_LOG_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("4 local ranks, loopback, gloo; torch ")
    for phase in ("find the world", "store", "process group", "first all_reduce", "all"):
        row = next(line for line in lines if line.startswith(phase))
        cells = row.removeprefix(phase).split()
        assert len(cells) == 3
        assert all(cell == "-" or float(cell) >= 0 for cell in cells)
    assert "Start-up report of a world with tp=2,dp=2, ms (commkit.start_report)" in lines
    for phase in ("join", "digest", "create/tp", "first_use/dp"):
        slowest, rank, median, fastest, ranks = next(
            line.split()[1:] for line in lines if line.startswith(f"{phase} ")
        )
        assert float(slowest) >= float(median) >= float(fastest) >= 0
        assert 0 <= int(rank) < 4 and ranks == "4"
    assert any("busbw" in line for line in lines)
    assert lines[-1] == "BAR exit_code_of_the_sweep 0 == 0 ok"

    kept = [json.loads(line) for line in records.read_text().splitlines()]
    starts = [record for record in kept if "way" in record]
    assert {record["way"] for record in starts} == {"commkit", "stock", "barrier"}
    for record in starts:
        assert record["how"] == "local ranks, loopback"
        seconds = record["seconds"]
        assert all(value >= 0 for value in seconds.values())
    assert any(record.get("collective") == "all_reduce" for record in kept)
