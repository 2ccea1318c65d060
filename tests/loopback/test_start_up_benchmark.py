"""benchmarks/start_up.py as a smoke run: real ranks, counters, and a ratio that makes sense."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

WAYS = {
    "none": {"stock", "barrier", "commkit", "patched"},
    "gloo": {"stock", "barrier", "lazy", "commkit", "patched"},
}


@pytest.mark.timeout(180)
def test_a_start_is_compared_with_stock_torch_by_time_and_by_counters(repository, tmp_path):
    records = tmp_path / "records.jsonl"
    command = [sys.executable, "benchmarks/start_up.py", "--quick", "--ranks", "16"]
    command += ["--parts", "init"]
    done = subprocess.run(
        [*command, "--json", str(records)],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    assert "loopback" in done.stdout.splitlines()[0]
    for backend in WAYS:
        assert f"{backend}, 16 ranks on 2 simulated hosts" in done.stdout
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert {(row["backend"], row["way"]) for row in rows} == {
        (backend, way) for backend, ways in WAYS.items() for way in ways
    }
    found = {(row["backend"], row["way"]): row for row in rows}
    for row in rows:
        assert row["how"] == "real ranks on simulated hosts of 8, loopback" and row["ranks"] == 16
        assert 0 < row["lowest"] <= row["seconds"] <= row["highest"]
        if row["way"] in ("commkit", "patched"):
            assert list(row["phases"]) == ["resolve", "join", "store", "process_group"]
            assert sum(row["phases"].values()) <= row["highest"]
        else:
            assert not row["phases"]
    for backend in WAYS:
        for way in ("commkit", "patched"):
            mine, stock = found[backend, way], found[backend, "stock"]
            # A machine may stand still for one of the two; ten times as long is another fault.
            assert mine["seconds"] <= 10 * stock["seconds"] + 1
            assert mine["operations_a_rank"] <= stock["operations_a_rank"] + 1
            if mine["connections_a_rank"] is not None:
                # One to its host's store; between the two hosts a few; small worlds of gloo connect
                # at once, as torch's do.
                most = 1.5 if backend == "none" else stock["connections_a_rank"] + 1.5
                assert 1 <= mine["connections_a_rank"] <= most
    if found["gloo", "stock"]["connections_a_rank"] is not None:
        # Each pair of ranks, and the store.
        assert found["gloo", "stock"]["connections_a_rank"] >= 15 / 2 + 1
    # The store's barrier: an operation of each rank, another of the last, a wait of each.
    extra = (
        found["none", "barrier"]["operations_a_rank"] - found["none", "stock"]["operations_a_rank"]
    )
    assert 2 <= extra <= 4


GROUP_WAYS = {
    "ids": {"stock", "barrier", "local", "commkit", "patched"},
    "gloo": {"stock", "barrier", "local", "lazy", "commkit", "eager", "patched"},
}


@pytest.mark.timeout(240)
def test_all_groups_are_made_every_way_and_the_busiest_process_is_counted(repository, tmp_path):
    records = tmp_path / "records.jsonl"
    command = [sys.executable, "benchmarks/start_up.py", "--quick", "--ranks", "8,16"]
    done = subprocess.run(
        [*command, "--parts", "groups", "--json", str(records)],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert done.returncode == 0, done.stderr
    for backend in GROUP_WAYS:
        assert f"{backend}, 16 ranks on 2 simulated hosts, tp=4,dp=2,pp=2, 40 groups" in done.stdout
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    found = {(row["backend"], row["ranks"], row["way"]): row for row in rows}
    assert {(backend, way) for backend, _, way in found} == {
        (backend, way) for backend, ways in GROUP_WAYS.items() for way in ways
    }
    for row in rows:
        assert row["how"] == "real ranks on simulated hosts of 8, loopback"
        assert list(row["marks"]) == ["init", "made", "used"]
        assert 0 < row["marks"]["init"] < row["marks"]["used"] == row["seconds"]
        assert row["busiest"] > 0 and row["own_mib"] > 0
    for ranks in (8, 16):
        stock, barrier = (found["ids", ranks, way] for way in ("stock", "barrier"))
        # An add, a look at the sum and a wait of each rank for the world and for each group; who
        # comes last to a group looks at its sum more than once.
        extra = barrier["busiest"] - stock["busiest"]
        assert 3 * ranks * stock["groups"] <= extra <= 4 * ranks * (stock["groups"] + 1) + 40
        for way in ("commkit", "patched"):
            assert found["ids", ranks, way]["busiest"] < barrier["busiest"] / 2
    # Ids of one host's groups stay there: twice the hosts are not twice the requests of one agent.
    one, two = (found["ids", ranks, "commkit"]["busiest"] for ranks in (8, 16))
    assert two < 2 * one
