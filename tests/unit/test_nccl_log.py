"""Init timings in NCCL's log, in the forms that its versions write."""

from __future__ import annotations

import os
import socket

from commkit import nccl_log

# From logs of NCCL 2.19, 2.26 and 2.27 on other people's clusters; hosts renamed.
LOG = """\
h1:7622:7638 [2] NCCL INFO Init timings: rank 2 nranks 8 total 0.66 (kernels 0.42, bootstrap 0.07, allgathers 0.03, topo 0.06, graphs 0.05, connections 0.02, rest 0.00)
h1:7622:7642 [6] NCCL INFO ncclCommInitRank comm 0x55555b0ba430 rank 6 nranks 8 cudaDev 6 nvmlDev 6 busId bb000 commId 0xb1a317b2c0f1498c - Init COMPLETE
(RayWorker pid=927) h2:927:927 [0] NCCL INFO Init timings - ncclCommInitRank_impl: rank 0 nranks 2 total 3.18 (kernels 2.81, alloc 0.26, bootstrap 0.06, allgathers 0.00, topo 0.04, graphs 0.00, connections 0.01, rest 0.00)
h3:53:267 [0] NCCL INFO Init timings - ncclCommInitRankConfig: rank 3 nranks 4 total 1.16 (kernels 0.18, alloc 0.04, bootstrap 0.93, allgathers 0.00, topo 0.00, graphs 0.00, connections 0.00, rest 0.00)
h4:1796:1796 [0] NCCL INFO Init timings - ncclCommInitRankConfig: rank 0 nranks 8 total 2.48 (kernels 0.34, alloc h4:1797:1797 [1] NCCL INFO ncclCommInitRankConfig comm 0x55cdbfbb89a0 rank 1 nranks 8 cudaDev 1 nvmlDev 1 busId 64000 commId 0x5ce9425bd0a52729 - Init COMPLETE
1.30, bootstrap 0.19, allgathers 0.00, topo 0.08, graphs 0.02, connections 0.54, rest 0.01)
h5:1:2 [0] NCCL INFO Bootstrap timings total 0.001447 (create 0.000081, send 0.000255, recv 0.000268, ring 0.000068, delay 0.000000)
"""  # noqa: E501


def test_lines_of_old_and_new_versions_are_read_and_torn_ones_left_out():
    found = nccl_log.parse(LOG)
    assert [(t.pid, t.rank, t.size, t.function, t.total) for t in found] == [
        (7622, 2, 8, "", 0.66),
        (927, 0, 2, "ncclCommInitRank_impl", 3.18),
        (53, 3, 4, "ncclCommInitRankConfig", 1.16),
    ]
    assert "alloc" not in found[0].parts
    assert found[1].parts["kernels"] == 2.81
    assert found[2].parts == {
        "kernels": 0.18,
        "alloc": 0.04,
        "bootstrap": 0.93,
        "allgathers": 0.0,
        "topo": 0.0,
        "graphs": 0.0,
        "connections": 0.0,
        "rest": 0.0,
    }


def test_the_log_of_this_process_is_found_where_nccl_writes_it(tmp_path):
    host = socket.gethostname().partition(".")[0]
    mine = f"{host}:{os.getpid()}:9 [0] NCCL INFO " + LOG.splitlines()[3].partition("INFO ")[2]
    (tmp_path / f"nccl-{host}-{os.getpid()}.log").write_text(f"{mine}\n{LOG}")
    where = {"NCCL_DEBUG_FILE": f"{tmp_path}/nccl-%h-%p.log"}
    assert [timing.total for timing in nccl_log.of_this_process(where)] == [1.16]
    assert nccl_log.of_this_process({}) == []
    assert nccl_log.of_this_process({"NCCL_DEBUG_FILE": f"{tmp_path}/none"}) == []


def test_a_timing_goes_to_the_only_group_that_it_fits():
    timings = nccl_log.parse(LOG)
    groups = [("dp", 3, 4), ("tp", 0, 2), ("pp", 2, 8), ("ep", 2, 8), ("cp", 1, 4)]
    found = nccl_log.by_family(timings, groups)
    assert {family: timing.total for family, timing in found.items()} == {"dp": 1.16, "tp": 3.18}
