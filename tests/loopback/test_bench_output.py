"""What real runs write: the table, the records, the comparison with an earlier run."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest

from commkit import records
from commkit.bench import formats
from commkit.bench.plots import results

pytestmark = pytest.mark.timeout(120)

BENCH = (sys.executable, "-m", "commkit", "bench")
SWEEP = ("all_reduce", "--nproc", "2", "--stock", "-b", "8", "-e", "4K", "-f", "8", "-n", "6")
SECRETS = {
    "NCCL_PLUGIN_TOKEN": "planted-1",
    "UCX_TLS_PASSWORD": "planted-2",
    "FI_AUTH_KEY": "planted-3",
    "COMMKIT_SECRET": "planted-secret-of-commkit",
    "AWS_SECRET_ACCESS_KEY": "planted-5",
    "GITHUB_TOKEN": "planted-6",
    "HOME_OF_NOBODY": "planted-7",
}


@pytest.fixture(scope="module")
def environment(repository):
    path = os.pathsep.join(filter(None, (str(repository), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


@pytest.fixture(scope="module")
def first(environment, tmp_path_factory):
    """One run with everything that is written; (its result, its directory)."""
    directory = tmp_path_factory.mktemp("run")
    done = subprocess.run(
        (*BENCH, *SWEEP, "--wide", "--link-speed", "10", "--json", "out.jsonl"),
        cwd=directory,
        env={**environment, **SECRETS, "NCCL_ALGO": "Ring"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (directory / "table.txt").write_text(done.stdout)
    return done, directory


def test_the_table_of_a_run_says_what_its_records_say(first):
    _, directory = first
    table = formats.read(directory / "table.txt")
    whole = formats.read(directory / "out.jsonl")
    assert not table.notes and len(table.records) == len(whole.records) == 8
    for short, full in zip(table.records, whole.records, strict=True):
        for name in ("collective", "dtype", "redop", "root", "in_place", "bytes", "count"):
            assert getattr(short, name) == getattr(full, name)
        for name in ("world_size", "hosts", "wrong", "backend", "iterations", "tool", "time_is"):
            assert getattr(short, name) == getattr(full, name)
        for name in ("time_us", "min_us", "p99_us", "max_us"):
            # Seven characters hold five digits or more.
            assert getattr(short, name) == pytest.approx(getattr(full, name), rel=1e-3, abs=0.006)
        assert short.busbw_gbps == pytest.approx(full.busbw_gbps, rel=1e-3)
        assert full.link_percent == pytest.approx(10 * full.busbw_gbps)
        assert len(full.rank_times_us) == 2 and full.slowest_rank in (0, 1)
    header = next(line for line in first[0].stdout.splitlines() if " redop " in line)
    assert header.split()[-6:] == ["p95", "p95-ip", "slow", "skew%", "xhost", "link%"]


def test_no_secret_of_the_environment_is_written_anywhere(first):
    done, directory = first
    for text in (done.stdout, done.stderr, (directory / "out.jsonl").read_text()):
        assert "planted" not in text
    kept = {name for r in records.read(directory / "out.jsonl") for name in r.environment}
    assert "NCCL_ALGO" in kept and not kept & {*SECRETS}


@pytest.mark.parametrize(
    ("factor", "code", "verdict"), [(1e-3, 5, "SLOWER"), (1e3, 0, "faster")], ids=["slow", "fast"]
)
def test_a_run_is_held_against_a_baseline(first, environment, tmp_path, factor, code, verdict):
    """A thousand times is no noise."""
    old = [
        dataclasses.replace(
            record,
            times_us=tuple(factor * value for value in record.times_us),
            time_us=factor * record.time_us,
        )
        for record in records.read(first[1] / "out.jsonl")
    ]
    path = tmp_path / "old.jsonl"
    path.write_text("".join(records.to_line(record) + "\n" for record in old))
    done = subprocess.run(
        (*BENCH, *SWEEP, "--baseline", str(path)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (code, "")
    rows = [line for line in done.stdout.splitlines() if line.endswith(verdict)]
    assert len(rows) == 8
    assert "# 8 rows at 5 %:" in done.stdout
    assert "# differs: NCCL_ALGO: Ring -> unset" in done.stdout


def test_a_baseline_that_cannot_be_read_stops_the_run_before_it_starts(environment, tmp_path):
    done = subprocess.run(
        (*BENCH, *SWEEP, "--baseline", "no.jsonl"),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("commkit: no.jsonl: No such file or directory; expected")


def test_an_interrupted_run_leaves_a_table_and_records_that_can_be_used(environment, tmp_path):
    out = tmp_path / "out.jsonl"
    # Endless for this machine: only the interrupt can end it.
    process = subprocess.Popen(
        (*BENCH, *SWEEP[:-8], *"-b 8 -e 79999 -i 8 -n 100 --json".split(), str(out)),
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (out.exists() and out.read_text().count("\n") >= 6):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        text, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (130, "")
    (tmp_path / "table.txt").write_text(text)
    table, whole = formats.read(tmp_path / "table.txt"), formats.read(out)
    assert not table.notes
    assert [r.bytes for r in table.records] == [r.bytes for r in whole.records]
    assert len(whole.records) >= 6
    assert len({chart.name for chart in results.charts([("out", whole.records)])}) >= 4
