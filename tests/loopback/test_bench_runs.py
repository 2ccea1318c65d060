"""commkit bench with real ranks: collectives, groups, modes, pairs, init, and faults in each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from commkit import records
from commkit.measure.collectives import COLLECTIVES

pytestmark = pytest.mark.timeout(150)

BENCH = (sys.executable, "-m", "commkit", "bench")


@pytest.fixture
def bench(repository, tmp_path):
    def run(*command, env=None, timeout=140):
        path = os.pathsep.join(filter(None, (str(repository), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def shown(text):
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


EVERYTHING = """
import sys
from dataclasses import replace
from commkit.bench import arguments, main
from commkit.measure.collectives import COLLECTIVES
plan = arguments.plan(collective=tuple(COLLECTIVES), minbytes="0", maxbytes="1003", stepfactor=40,
                      iters=2, root=int(sys.argv[1]), nproc=int(sys.argv[2]), json="out.jsonl",
                      datatype=sys.argv[3], op=sys.argv[4], stock=True)
sys.exit(main.run(plan))
"""


@pytest.mark.parametrize(
    ("root", "ranks", "types", "op"), [(2, 3, "float", "all"), (1, 2, "all", "max")]
)
def test_every_collective_delivers_what_it_should_on_gloo(bench, tmp_path, root, ranks, types, op):
    code, out, err = bench(sys.executable, "-c", EVERYTHING, str(root), str(ranks), types, op)
    assert (code, err) == (0, "")
    found = list(records.read(tmp_path / "out.jsonl"))
    assert {record.collective for record in found} == set(COLLECTIVES)
    for record in found:
        row = COLLECTIVES[record.collective]
        assert record.wrong == (0 if row.moves else None), record
        assert record.root == (root if row.rooted else -1)
        assert len(record.rank_times_us) == ranks
        assert record.skew >= 0
        assert (record.redop == "none") == (not row.reduces)
    sizes = {r.bytes for r in found if r.collective == "all_gather" and r.dtype == "float"}
    assert sizes == {0, 320 // ranks // 16 * 16 * ranks}
    if types == "all":
        assert {"int8", "half", "double", "bfloat16"} <= {r.dtype for r in found}
        assert "# not supported: all_reduce f8e4m3 max (gloo: " in out


def test_groups_of_a_layout_run_at_once_and_are_verified(bench, tmp_path):
    base = (*BENCH, "all_gather", "--nproc", "4", "-b", "1K", "-e", "1K", "-n", "8")
    code, out, err = bench(*base, "--layout", "tp=2,dp=2", "--group", "dp", "--json", "o")
    assert (code, err) == (0, "")
    assert "# dp: 2 groups of 2 ranks at the same time, first: 0 2" in out
    (record, _) = records.read(tmp_path / "o")
    assert (record.world_size, record.groups, record.group, record.wrong) == (2, 2, "dp", 0)
    assert len(record.rank_times_us) == 4
    assert record.busbw_gbps == pytest.approx(record.algbw_gbps / 2)
    assert record.precision is not None
    code, out, _ = bench(*base, "--groups", "split-by-host", env={"COMMKIT_HOST_ID": ""})
    assert code == 0
    assert "# split-by-host: 1 group of 4 ranks" in out


def test_families_run_different_collectives_at_once(bench, tmp_path):
    code, out, err = bench(
        *(*BENCH, "all_reduce", "--nproc", "4", "-b", "4K", "-e", "4K", "-n", "5"),
        *("--layout", "tp=2,dp=2", "--concurrent", "tp:all_gather,dp:reduce_scatter"),
        *("--json", "o"),
    )
    assert (code, err) == (0, "")
    found = list(records.read(tmp_path / "o"))
    assert [(r.group, r.collective, bool(r.concurrent)) for r in found] == [
        (group, collective, together)
        for together in (False, True)
        for group, collective in (("tp", "all_gather"), ("dp", "reduce_scatter"))
        for _ in range(2)
    ]
    assert all(record.wrong == 0 for record in found)
    first, second = found[4], found[6]
    assert first.times_us == second.times_us, "both last until the later one is done"
    assert first.concurrent == "tp:all_gather+dp:reduce_scatter"
    assert "# size 4096: together " in out


@pytest.mark.parametrize(
    ("flags", "mode", "aggregated"),
    [(("--async",), "async", 1), (("-m", "3"), "coalesced", 3)],
)
def test_calls_can_be_in_flight(bench, tmp_path, flags, mode, aggregated):
    code, out, _ = bench(
        *(*BENCH, "all_to_all", "--nproc", "2", "-b", "4K", "-e", "4K", "--stock", "--json", "o"),
        *flags,
    )
    assert code == 0
    assert f"agg iters: {aggregated} " in out
    for record in records.read(tmp_path / "o"):
        assert (record.mode, record.aggregated, record.wrong) == (mode, aggregated, 0)


def test_sizes_are_repeated_until_precise_or_the_budget_is_spent(bench, tmp_path):
    base = (*BENCH, "all_reduce", "--nproc", "2", "-b", "64", "-e", "64", "--stock", "--json", "o")
    code, _, _ = bench(*base, "-n", "10", "--precision", "60%", "--budget", "20")
    assert code == 0
    for record in records.read(tmp_path / "o"):
        assert record.iterations % 10 == 0
        assert record.precision <= 0.6 or sum(record.times_us) > 1e6
    (tmp_path / "o").unlink()
    code, _, _ = bench(*base, "--budget", "0.0000001")
    assert code == 0
    assert {record.iterations for record in records.read(tmp_path / "o")} == {3}


def test_all_pairs_are_measured_in_rounds(bench, tmp_path):
    code, out, err = bench(*BENCH, "pairs", "--nproc", "5", "-b", "64K", "-n", "4", "--json", "o")
    assert (code, err) == (0, "")
    assert "# pairs (all): 5 ranks on 1 hosts, 10 pairs in 5 rounds" in out
    found = list(records.read(tmp_path / "o"))
    assert len({(r.source, r.peer) for r in found}) == 10
    assert {(r.collective, r.bytes) for r in found} == {("ping_pong", 8), ("exchange", 65536)}
    assert {r.wrong for r in found} == {0}
    matrix = [line for line in out.splitlines() if not line.startswith("#")]
    assert len(matrix) == 12
    assert all(len(line) == 7 + 5 * 9 for line in matrix)


def test_a_start_is_measured_beside_stock_torch(bench):
    code, out, err = bench(
        *BENCH, "init", "--nproc", "2", "--cycles", "2", "--layout", "tp=2", "--backend", "gloo"
    )
    assert (code, err) == (0, "")
    phases = {row[0]: row for row in shown(out)}
    for phase in ("join", "store", "process_group", "init_process_group", "groups", "all"):
        assert phase in phases
    assert float(phases["all"][1]) > float(phases["groups"][1]) > 0
    assert float(phases["all"][3]) > 0, "stock torch stands beside it"
    assert phases["join"][3] == "-"


def test_what_is_not_installed_is_named_with_the_line_that_installs_it(bench):
    hide = "import sys; sys.modules['mpi4py'] = None; sys.modules['cupy'] = None; "
    code = hide + "from commkit.bench import worlds; worlds.require(sys.argv[1])"
    for backend, line in (
        ("mpi", "pip install mpich mpi4py"),
        ("cupy", "pip install cupy-cuda12x"),
    ):
        _, _, err = bench(sys.executable, "-c", code, backend)
        assert f"LaunchError: --backend {backend}: no usable " in err
        assert line in err


@pytest.mark.slow
def test_a_bare_bench_measures_the_common_collectives(bench):
    code, out, err = bench(*BENCH, "--nproc", "2", "--stock", "--backend", "gloo")
    assert (code, err) == (0, "")
    rows = shown(out)
    assert [line.rpartition(" ")[2] for line in out.splitlines() if "starting" in line] == [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "reduce",
    ]
    assert {row[8] for row in rows} == {row[12] for row in rows} == {"0"}
    assert max(int(row[0]) for row in rows) == 32 << 20


def test_a_fake_world_of_256_ranks_is_one_process_and_says_so(bench, tmp_path):
    code, out, err = bench(
        *(*BENCH, "all_reduce", "--backend", "fake", "--nproc", "256", "-b", "8", "-e", "1K"),
        *("-f", "128", "--json", "o"),
    )
    assert (code, err) == (0, "")
    assert "# simulated: one process, peers are only counted, no data are moved" in out
    for record in records.read(tmp_path / "o"):
        assert (record.world_size, record.start, record.wrong) == (256, "fake", None)
        assert record.busbw_gbps == pytest.approx(record.algbw_gbps * 2 * 255 / 256)


MEMORY = """
import os, resource, sys
from commkit.bench import arguments, main, session

plan = arguments.plan(minbytes="48M", maxbytes="48M", iters=2, stock=True)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

def body(place):
    before = peak()
    code = session.run(plan, place)
    os.write(1, f"rank {place.rank}: {peak() - before}\\n".encode())
    return code

sys.exit(main.local(2, body))
"""


def test_a_rank_takes_little_more_memory_than_its_buffers(bench):
    code, out, err = bench(sys.executable, "-c", MEMORY)
    assert (code, err) == (0, "")
    taken = [int(line.split()[2]) for line in out.splitlines() if line.startswith("rank ")]
    assert len(taken) == 2
    assert all(2 * 48 <= mib <= 2 * 48 + 64 for mib in taken), taken


LIBRARY = """
import json, os, sys
import commkit, commkit.bench
import torch, torch.distributed as dist
from commkit.bench.main import local
from commkit.measure.torch_backend import TorchBackend

def body(place):
    commkit.init_process_group("gloo", init_method=place.init_method, rank=place.rank,
                               world_size=place.world_size, layout="tp=2,dp=2")
    quick = dict(minbytes="1K", maxbytes="1K", iters=2)
    found = commkit.bench.run(("all_gather", "reduce"), group="tp", **quick)
    said = [[r.collective, r.world_size, r.wrong, r.start] for r in found]
    third = dist.new_group([0, 1, 2])
    outside = commkit.bench.run(group=third, **quick) if place.rank == 3 else None
    flip = TorchBackend.all_to_all
    def wrong(self, op):
        flip(self, op)
        if self.rank == 1:
            op.receive[5] = 0.5
    TorchBackend.all_to_all = wrong
    try:
        commkit.bench.run("all_to_all", **quick)
        error = ""
    except commkit.WrongData as caught:
        error = str(caught)
    os.write(1, (json.dumps([place.rank, said, outside, error]) + "\\n").encode())
    commkit.destroy_process_group()
    return 0

sys.exit(local(4, body))
"""


def test_a_running_job_can_call_it(bench):
    import json

    code, out, err = bench(sys.executable, "-c", LIBRARY)
    assert (code, err) == (0, "")
    lines = sorted(json.loads(line) for line in out.splitlines())
    assert [line[0] for line in lines] == [0, 1, 2, 3]
    for rank, said, outside, error in lines:
        assert said == [
            [name, 2, 0, "commkit"] for name in ("all_gather", "all_gather", "reduce", "reduce")
        ]
        assert outside == ([] if rank == 3 else None)
        assert error.startswith("all_to_all of 1024 bytes out of place: 1 wrong elements, first: ")
        assert "rank 1 index 5 got 0.5 expected " in error


FAULT = """
import sys, time, signal, os
from commkit.bench import arguments, main, session
from commkit.measure.torch_backend import TorchBackend

how, name = sys.argv[1:]
plan = arguments.plan(collective=name, minbytes="1K", maxbytes="4K", stepfactor=4, iters=3,
                      timeout=float(4 if how != "flip" else 60), json="out.jsonl")
original = getattr(TorchBackend, name)
calls = 0

def faulty(self, op):
    global calls
    original(self, op)
    if op.shape.total == 1024:
        calls += 1
        if self.rank == 1 and calls == 3:
            if how == "sleep":
                time.sleep(1000)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        if how == "flip" and self.rank == 1:
            op.receive[7] += 1

setattr(TorchBackend, name, faulty)

def body(place):
    code = session.run(plan, place)
    os.write(1, f"rank {place.rank} ends with {code}\\n".encode())
    return code

sys.exit(main.local(3, body))
"""


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_wrong_data_of_any_collective_end_every_rank_with_4(bench, name):
    # 4080 of 4096 bytes, or 1008 of 1024: a rank's part is a multiple of 16.
    program = FAULT.replace("== 1024", "== 1020")
    code, out, err = bench(sys.executable, "-c", program, "flip", name)
    assert (code, err) == (4, "")
    assert "# first bad (out of place): rank 1 index 7 got " in out
    assert sorted(line for line in out.splitlines() if "ends with" in line) == [
        f"rank {rank} ends with 4" for rank in range(3)
    ]


@pytest.mark.parametrize("how", ["sleep", "stop"])
def test_the_rank_that_did_not_finish_is_named_and_the_records_are_kept(bench, tmp_path, how):
    program = FAULT.replace("== 1024", "== 1020")
    code, _, err = bench(sys.executable, "-c", program, how, "all_gather")
    assert code == 124
    lines = [line for line in err.splitlines() if "did not finish" in line]
    assert len(lines) == 1, err
    assert lines[0].startswith("commkit: rank 0 of 3: size 4096: ")
    if how == "sleep":
        assert "did not finish: rank 1 (size 4096: timing out of place, call 2 of a batch" in err
    else:
        assert "did not finish and does not answer: rank 1;" in lines[0]
    assert len(list(records.read(tmp_path / "out.jsonl"))) == 2


@pytest.mark.mpiexec
def test_mpi_moves_the_same_data_from_host_buffers(bench, mpiexec, tmp_path):
    program = EVERYTHING.replace("nproc=int(sys.argv[2])", "backend='mpi'")
    command = (mpiexec, "-n", "3", sys.executable, "-c", program, "1", "3", "float", "sum")
    code, _, err = bench(*command)
    assert code == 0, err
    found = list(records.read(tmp_path / "out.jsonl"))
    assert {record.collective for record in found} == set(COLLECTIVES)
    assert all(r.wrong == (0 if COLLECTIVES[r.collective].moves else None) for r in found)
    assert {record.start for record in found} == {"mpi"}
    assert "mpi" in found[0].versions


@pytest.mark.mpiexec
def test_what_mpi_cannot_reduce_it_can_move(bench, mpiexec, tmp_path):
    program = EVERYTHING.replace("nproc=int(sys.argv[2])", "backend='mpi'")
    code, out, err = bench(sys.executable, "-c", program, "0", "1", "bfloat16", "sum")
    assert (code, err) == (0, "")
    assert "# not supported: all_reduce bfloat16 sum (mpi: MPI cannot reduce bfloat16)" in out
    found = list(records.read(tmp_path / "out.jsonl"))
    assert {r.wrong for r in found if r.collective == "all_to_all_v"} == {0}
    assert "reduce" not in {r.collective for r in found}


TWO_RUNS = """
import sys
from commkit.bench import arguments, main
flags = dict(minbytes="1K", maxbytes="1K", iters=3, backend="mpi", json="o")
sys.exit(main.run(arguments.plan(groups="%2", **flags))
         or main.run(arguments.plan(**flags), pairs="all"))
"""


@pytest.mark.mpiexec
def test_mpi_runs_in_groups_and_pairs(bench, mpiexec, tmp_path):
    code, _, err = bench(mpiexec, "-n", "4", sys.executable, "-c", TWO_RUNS)
    assert code == 0, err
    found = list(records.read(tmp_path / "o"))
    assert {(r.groups, r.world_size, r.wrong) for r in found[:2]} == {(2, 2, 0)}
    assert len({(r.source, r.peer) for r in found[2:]}) == 6
    assert {r.wrong for r in found[2:]} == {0}


def test_mpi_is_not_started_by_forks(bench):
    code, _, err = bench(*BENCH, "all_reduce", "--nproc", "2", "--backend", "mpi")
    assert code == 2
    assert "mpiexec -n 2 commkit bench" in err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_64_ranks_share_two_cores(bench, tmp_path):
    """Memory of a rank stays within its buffers and 64 MiB: forks share torch's own pages."""
    code, _, err = bench(
        *(*BENCH, "all_reduce", "--nproc", "64", "-b", "8", "-e", "1M", "-f", "64", "-n", "3"),
        *("--json", "o"),
        timeout=800,
    )
    assert code == 0, err
    assert {(r.world_size, r.wrong) for r in records.read(tmp_path / "o")} == {(64, 0)}
