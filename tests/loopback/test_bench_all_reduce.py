"""commkit bench all_reduce with real ranks: every way to start it, and every way it can end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from commkit import records

pytestmark = pytest.mark.timeout(120)

BENCH = (sys.executable, "-m", "commkit", "bench", "all_reduce")
QUICK = ("-n", "3")


@pytest.fixture
def bench(repository, tmp_path):
    """Runs a command in a clean directory; (exit code, stdout, stderr)."""

    def run(*command, env=None, timeout=100):
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path(repository), **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def path(repository):
    return os.pathsep.join(filter(None, (str(repository), os.environ.get("PYTHONPATH"))))


def rows(text):
    """Rows as a reader of nccl-tests finds them: columns by the words of the header line."""
    lines = text.splitlines()
    (header,) = (line.lstrip("# ").split() for line in lines if "size" in line and "redop" in line)
    assert header == ["size", "count", "type", "redop", "root"] + 2 * [
        "time",
        "algbw",
        "busbw",
        "#wrong",
    ]
    found = []
    for line in lines:
        if line and not line.startswith("#"):
            words = line.split()
            assert len(words) == len(header), line
            found.append(words)
    return found


@pytest.mark.parametrize("start", [(), ("--stock",)], ids=["commkit", "torch"])
def test_local_ranks_sweep_and_verify(bench, start, tmp_path):
    command = (*BENCH, "--nproc", "3", "-b", "0", "-e", "4K", "-f", "16", *QUICK, *start)
    code, out, err = bench(*command, "--json", "out.jsonl")
    assert (code, err) == (0, "")
    assert [(row[0], row[1]) for row in rows(out)] == [
        ("0", "0"),
        ("8", "2"),
        ("128", "32"),
        ("2048", "512"),
    ]
    assert all(row[8] == row[12] == "0" for row in rows(out))
    assert "# loopback: all ranks are on one host" in out
    assert "# Out of bounds values : 0 OK" in out
    found = list(records.read(tmp_path / "out.jsonl"))
    assert [record.bytes for record in found] == [0, 0, 8, 8, 128, 128, 2048, 2048]
    assert [record.in_place for record in found] == [False, True] * 4
    assert {record.start for record in found} == {"torch" if start else "commkit"}
    assert len({record.run for record in found}) == 1
    for record in found:
        assert (record.world_size, record.hosts, record.wrong) == (3, 1, 0)
        assert len(record.times_us) == 3
        assert min(record.times_us) <= record.time_us <= max(record.times_us)
        assert 0 <= record.slowest_rank < 3
        if record.bytes:
            assert record.algbw_gbps == pytest.approx(record.bytes / record.time_us / 1e3, rel=1e-3)
            assert record.busbw_gbps == pytest.approx(record.algbw_gbps * 4 / 3)
        else:
            assert record.algbw_gbps == record.busbw_gbps == 0


def test_types_and_reductions_that_gloo_lacks_are_named_and_the_others_verified(bench):
    code, out, err = bench(
        *BENCH, "--nproc", "2", "--stock", "-b", "98", "-e", "98", *QUICK, "-d", "all", "-o", "all"
    )
    assert (code, err) == (0, "")
    assert "# not supported: all_reduce f8e4m3 sum (gloo: " in out
    measured = {(row[2], row[3]) for row in rows(out)}
    for name in ("int8", "uint8", "int32", "int64", "half", "float", "double", "bfloat16"):
        assert {(name, redop) for redop in ("sum", "prod", "max", "min")} <= measured
    assert ("f8e4m3", "sum") not in measured
    assert all(row[8] == row[12] == "0" for row in rows(out))
    # 98 bytes are 24 floats.
    assert {row[0] for row in rows(out) if row[2] == "float"} == {"96"}


def test_an_unsupported_type_alone_is_a_usage_error_said_once(bench):
    code, out, err = bench(*BENCH, "--nproc", "2", "--stock", "-d", "f8e5m2", "-b", "8", "-e", "8")
    assert (code, out) == (2, "")
    assert err.startswith("commkit: all_reduce is not supported for f8e5m2 sum (gloo: ")
    assert err.count("\n") == 1


def test_without_verification_nothing_is_called_right(bench):
    code, out, _ = bench(*BENCH, "--nproc", "2", "--stock", "-b", "8", "-e", "8", "-c", "0", *QUICK)
    assert code == 0
    assert [(row[8], row[12]) for row in rows(out)] == [("N/A", "N/A")]


def test_records_on_standard_output_leave_the_table_to_standard_error(bench):
    code, out, err = bench(
        *BENCH, "--nproc", "2", "--stock", "-b", "8", "-e", "16", "-f", "2", *QUICK, "--json", "-"
    )
    assert code == 0
    assert [records.from_line(line).bytes for line in out.splitlines()] == [8, 8, 16, 16]
    assert [row[0] for row in rows(err)] == ["8", "16"]


@pytest.mark.parametrize("start", [(), ("--stock",)], ids=["commkit", "torch"])
def test_one_process_alone_is_a_world_of_one_with_a_notice(bench, start, tmp_path):
    code, out, err = bench(*BENCH, "-b", "64", "-e", "64", *QUICK, *start, "--json", "one.jsonl")
    assert (code, err) == (0, "")
    assert "# single rank: bus bandwidth is not defined" in out
    assert "loopback" not in out
    assert [row[7] for row in rows(out)] == ["0.00"]
    assert {record.busbw_gbps for record in records.read(tmp_path / "one.jsonl")} == {None}


@pytest.mark.parametrize("start", [(), ("--stock",)], ids=["commkit", "torch"])
def test_torchrun_starts_the_ranks(bench, start):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    code, out, err = bench(
        *torchrun, *("-m", "commkit", *BENCH[3:]), *("-b", "8", "-e", "8", *QUICK, *start)
    )
    assert code == 0, err
    assert "2 ranks on 1 host" in out
    assert [row[0] for row in rows(out)] == ["8"]


@pytest.mark.mpiexec
def test_mpiexec_starts_the_ranks(bench, mpiexec):
    code, out, err = bench(mpiexec, "-n", "2", *BENCH, "-b", "8", "-e", "8", *QUICK)
    assert code == 0, err
    assert "2 ranks on 1 host" in out
    assert [row[0] for row in rows(out)] == ["8"]


@pytest.mark.mpiexec
def test_ranks_that_their_launcher_cannot_reach_are_not_n_worlds_of_one(bench, mpiexec, repository):
    bare = ("env", "-i", f"PYTHONPATH={path(repository)}", f"PATH={os.environ['PATH']}")
    code, _, err = bench(mpiexec, "-n", "2", *bare, *BENCH, "-b", "8", "-e", "8")
    assert code == 3
    assert "started 2 processes, but this process is a world of one" in err


def test_a_batch_jobs_variables_are_not_a_world_of_one(bench):
    code, out, err = bench(*BENCH, "-b", "8", "-e", "8", env={"SLURM_NTASKS": "16"})
    assert (code, out) == (3, "")
    assert err.startswith("commkit: SLURM_NTASKS=16, but this process is a world of one")


@pytest.mark.parametrize(
    ("flags", "code", "expected"),
    [
        (("-b", "2G", "-e", "1G"), 2, "-b 2G is larger than -e 1G"),
        (("-b", "8", "-e", "64", "-f", "1"), 2, "-f 1: factor must be >= 2"),
        (("-b", "8", "-e", "64", "-i", "0"), 2, "-i 0: step must be > 0"),
        (("--min-busbw", "1"), 2, "--min-busbw: bus bandwidth is not defined for one rank"),
        (("--nproc", "2", "--stock", "-b", "900T"), 2, "-e 989560464998400: two buffers need"),
        (("--nproc", "2", "--stock", "--json", "no/file"), 2, "--json no/file: No such file"),
        (("--nproc", "2", "--backend", "nccl", "-b", "8"), 3, "--backend nccl: local rank"),
    ],
)
def test_what_cannot_run_is_refused_in_a_line_without_a_table(bench, flags, code, expected):
    if "nccl" in flags:
        import torch

        if torch.cuda.device_count() >= 2:
            flags = (*flags[:1], str(torch.cuda.device_count() + 1), *flags[2:])
    found, out, err = bench(*BENCH, *flags)
    assert (found, out) == (code, "")
    # Each local rank may speak for itself; none has a traceback.
    assert all(line.startswith("commkit: ") for line in err.splitlines())
    assert f"commkit: {expected}" in err


def test_a_missed_gate_names_the_size(bench):
    code, out, _ = bench(
        *BENCH,
        *("--nproc", "2", "--stock", "-b", "8", "-e", "64K", "-f", "8192", *QUICK),
        *("--min-busbw", "1e-9", "--min-busbw", "64K:1e9"),
    )
    assert code == 1
    assert next(line for line in out.splitlines() if "below" in line).startswith(
        "# below --min-busbw: size 65536 in place "
    )
    assert "size 8 in place" not in out


def test_ranks_with_different_arguments_are_told_so(bench, repository, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    other = subprocess.Popen(
        (*BENCH, "--stock", "-b", "8", "-e", "16", "-f", "2"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path(repository), **common, "RANK": "1"},
        stderr=subprocess.PIPE,
    )
    try:
        code, out, err = bench(
            *BENCH, "--stock", "-b", "8", "-e", "32", "-f", "2", env={**common, "RANK": "0"}
        )
        _, other_err = other.communicate(timeout=60)
    finally:
        other.kill()
        other.wait()
    assert (code, out, other.returncode, other_err) == (2, "", 2, b"")
    assert err.startswith("commkit: rank 1 (")
    assert "was started with other arguments than rank 0" in err


FAULTS = """
import os, signal, sys, time
from dataclasses import replace
import torch
from commkit import launch
from commkit.bench import arguments, launch_local, session
from commkit.bench.placement import Place
from commkit.measure.torch_backend import TorchBackend

fault, timeout = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else None
plan = arguments.plan(minbytes="1K", maxbytes="16K", stepfactor=4, iters=3, stock=True,
                      timeout=timeout, json="out.jsonl")

class Faulty(TorchBackend):
    calls = 0

    def buffer(self, count, number):
        if fault == "memory" and self.rank == 1 and count > 1:
            raise RuntimeError("out of memory\\nwith advice")
        return super().buffer(count, number)

    def all_reduce(self, send, receive, redop):
        super().all_reduce(send, receive, redop)
        if fault == "flip" and self.rank == 2 and receive.numel() == 1024:
            receive.view(torch.int32)[77] ^= 1
        self.calls += receive.numel() == 4096
        if self.rank == 1 and self.calls == 2:
            if fault == "hang":
                time.sleep(1000)
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)

def body(member):
    spec = launch.resolve(init_method=member.init_method, rank=member.rank,
                          world_size=member.world_size)
    spec = replace(spec, local_rank=member.rank, local_world_size=member.world_size)
    place = Place(spec, init_method=member.init_method, forked=True)
    code = session.run(plan, place, make_backend=Faulty)
    os.write(1, f"rank {member.rank} ends with {code}\\n".encode())
    return code

sys.exit(launch_local.run(4, body))
"""


def test_a_flipped_bit_of_one_rank_is_found_counted_and_fails_every_rank(bench, tmp_path):
    code, out, err = bench(sys.executable, "-c", FAULTS, "flip")
    assert (code, err) == (4, "")
    table = "\n".join(line for line in out.splitlines() if "ends with" not in line)
    assert [(row[0], row[8], row[12]) for row in rows(table)] == [
        ("1024", "0", "0"),
        ("4096", "1", "1"),
        ("16384", "0", "0"),
    ]
    assert "# first bad (in place): rank 2 index 77 got " in out
    assert "# Out of bounds values : 2 FAILED" in out
    assert sorted(line for line in out.splitlines() if "ends with" in line) == [
        f"rank {rank} ends with 4" for rank in range(4)
    ]
    wrong = [record for record in records.read(tmp_path / "out.jsonl") if record.wrong]
    assert [(r.bytes, r.first_wrong.rank, r.first_wrong.index) for r in wrong] == [
        (4096, 2, 77),
        (4096, 2, 77),
    ]
    assert wrong[0].first_wrong.got != wrong[0].first_wrong.expected


def test_a_rank_that_cannot_allocate_ends_all_at_once(bench):
    code, out, err = bench(sys.executable, "-c", FAULTS, "memory")
    assert code == 2
    assert err == "commkit: -e 16384: rank 1 cannot allocate two buffers: out of memory\n"
    assert "ends with" not in out


def test_a_stuck_rank_ends_all_at_the_deadline_with_the_phase(bench, tmp_path):
    code, _, err = bench(sys.executable, "-c", FAULTS, "hang", "3")
    assert code == 124
    for rank in range(4):
        assert f"commkit: rank {rank} of 4: size 16384: " in err
    assert "Traceback" not in err
    assert [record.bytes for record in records.read(tmp_path / "out.jsonl")] == [
        1024,
        1024,
        4096,
        4096,
    ]


def test_a_killed_rank_is_named_and_what_was_measured_is_kept(bench, tmp_path):
    code, _, err = bench(sys.executable, "-c", FAULTS, "kill")
    assert code == 1
    assert "commkit: rank 1 was ended by SIGKILL" in err
    assert "commkit: rank 0 of 4: size 16384: " in err
    assert "Traceback" not in err
    assert len(list(records.read(tmp_path / "out.jsonl"))) == 4


def test_an_interrupt_stops_all_ranks_after_the_same_size_and_keeps_the_records(
    repository, tmp_path
):
    out = tmp_path / "out.jsonl"
    # Endless for this machine: only the interrupt can end it.
    command = (*BENCH, "--nproc", "2", "--stock", "-b", "8", "-e", "79999", "-i", "8")
    process = subprocess.Popen(
        (*command, "-n", "100", "--json", str(out)),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path(repository)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (out.exists() and out.read_text().count("\n") >= 4):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        text, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (130, "")
    found = list(records.read(out))
    assert "# interrupted after " in text
    assert len(rows(text)) * 2 == len(found) >= 4
    assert found[-1].bytes < 79999


def test_a_reader_that_goes_away_ends_the_sweep_without_a_traceback(bench):
    shell = f"{' '.join(BENCH)} --nproc 2 --stock -b 8 -e 79999 -i 8 -n 100 | head -n 1"
    code, out, err = bench("bash", "-c", f"set -o pipefail; {shell}")
    assert (code, err) == (130, "")
    assert out.startswith("# commkit ")


def test_a_full_disk_is_one_line(bench):
    code, _, err = bench(
        *BENCH, "--nproc", "2", "--stock", "-b", "8", "-e", "8", "--json", "/dev/full"
    )
    assert code == 1
    assert "commkit: --json /dev/full: No space left on device; 0 sizes were kept\n" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("nproc", [(), ("--nproc", "2")])
def test_with_commkit_disabled_torch_starts_the_group_and_the_records_say_so(bench, nproc):
    code, out, _ = bench(
        *BENCH, *nproc, "-b", "8", "-e", "8", *QUICK, "--json", "-", env={"COMMKIT_DISABLE": "1"}
    )
    assert code == 0
    assert {records.from_line(line).start for line in out.splitlines()} == {"torch"}


def test_a_terminal_gets_a_bar_that_leaves_the_table_alone(repository, tmp_path):
    """The bar is on standard error, the table in a file; the bar is gone at the end."""
    master, slave = os.openpty()
    with open(tmp_path / "table", "w") as table, os.fdopen(master, "rb", 0) as terminal:
        process = subprocess.Popen(
            (*BENCH, "--nproc", "2", "--stock", "-b", "8", "-e", "32", "-f", "2", *QUICK),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path(repository), "TERM": "xterm", "COLUMNS": "100"},
            stdout=table,
            stderr=slave,
        )
        os.close(slave)
        shown = b""
        try:
            while piece := terminal.read(4096):
                shown += piece
        except OSError:
            pass  # a terminal whose last writer has gone
        assert process.wait(timeout=60) == 0
    assert b"sizes" in shown
    text = (tmp_path / "table").read_text()
    assert [row[0] for row in rows(text)] == ["8", "16", "32"]
    assert "\x1b" not in text
