"""Hosts that topology= moves to other ranks: who is who then, and hosts that disagree about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch_jobs
from mpi_jobs import Mpiexec

import commkit
from commkit import api
from commkit.topology.build import Builder
from commkit.topology.emit import emit
from commkit.topology.fabric import Nic
from commkit.topology.writers import write

pytestmark = pytest.mark.timeout(120)

HOSTS = ["host-0", "host-1", "host-2"]
#: Ranks 0 and 1 on host-2, 2 and 3 on host-0, 4 and 5 on host-1.
HOST_OF = [2, 0, 1]
VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE")


def placement(path, host_of=HOST_OF, hosts=HOSTS, each=2):
    path.write_text(emit("perm", host_of, hosts, each))
    return str(path)


def variables():
    return [os.environ.get(name) for name in VARIABLES]


def moved(**arguments):
    """Two worlds, one after the other; in each: (rank, variables, hosts of all ranks by rank)."""
    before, found = variables(), []
    for _ in range(2):
        commkit.init_process_group("gloo", **arguments)
        rank = dist.get_rank()
        total = torch.tensor([1 << rank])
        dist.all_reduce(total)
        assert total.item() == (1 << dist.get_world_size()) - 1
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, os.environ["COMMKIT_HOST_ID"])
        assert api.world().identity.local_rank == int(os.environ["LOCAL_RANK"])
        found.append((rank, variables(), names))
        commkit.destroy_process_group()
        assert variables() == before
    assert found[0] == found[1]
    return found[0]


def test_whole_hosts_take_on_the_ranks_of_the_file(tmp_path):
    env = {"GROUP_RANK": "9", "ROLE_RANK": "9", "ROLE_WORLD_SIZE": "6"}
    with torch_jobs.Job(6, hosts=3, log_dir=tmp_path, env=env) as job:
        path = placement(tmp_path / "perm.json")
        for rank in range(6):
            job.start(rank, moved_by, path if rank < 4 else None, env={
                # Given as an argument or by the variable, it is the same file.
                "COMMKIT_TOPOLOGY": "" if rank < 4 else path
            })  # fmt: skip
        outcomes = job.outcomes()
    for rank in range(6):
        assert not outcomes[rank].error, outcomes[rank].trace
        new = [2, 3, 4, 5, 0, 1][rank]
        local, group = str(new % 2), str(new // 2)
        names = ["host-2", "host-2", "host-0", "host-0", "host-1", "host-1"]
        assert outcomes[rank].value == (new, [str(new), local, group, str(new), "6"], names)


def moved_by(path):
    return moved(topology=path)


def _joins(**arguments):
    commkit.init_process_group("gloo", **arguments)


@pytest.mark.parametrize("other", ["another order", "no order"])
def test_hosts_with_another_file_are_named_to_every_rank(tmp_path, other):
    mine, theirs = placement(tmp_path / "a.json"), ""
    if other == "another order":
        theirs = placement(tmp_path / "b.json", [2, 1, 0])
    with torch_jobs.Job(6, hosts=3, log_dir=tmp_path) as job:
        for rank in range(6):
            path = theirs if rank // 2 == 1 else mine
            job.start(rank, _joins, env={"COMMKIT_TOPOLOGY": path})
        outcomes = job.outcomes()
    assert {outcome.error for outcome in outcomes.values()} == {"JoinError"}
    for outcome in outcomes.values():
        assert "host host-1 has the placement " in outcome.text
        assert "but host host-0 has COMMKIT_TOPOLOGY=" in outcome.text and mine in outcome.text
        assert (theirs or "none") in outcome.text


def test_ranks_of_one_host_with_other_files_are_named(tmp_path):
    a, b = placement(tmp_path / "a.json"), placement(tmp_path / "b.json", [2, 1, 0])
    with torch_jobs.Job(6, hosts=3, log_dir=tmp_path) as job:
        for rank in range(6):
            job.start(rank, _joins, env={"COMMKIT_TOPOLOGY": b if rank == 3 else a})
        outcomes = job.outcomes()
    assert {outcome.error for outcome in outcomes.values()} == {"JoinError"}
    for outcome in outcomes.values():
        assert "host host-1 has the placement " in outcome.text  # the host, or one rank there
        assert a in outcome.text and b in outcome.text


def fabric(names):
    """Hosts 0 and 2 under one leaf, 1 and 3 under another, a spine above."""
    build = Builder()
    for i, name in enumerate(names):
        build.attach(name, Nic(switch=build.switch(f"leaf{i % 2}")))
    for leaf in (0, 1):
        build.link(build.switch(f"leaf{leaf}"), build.switch("spine"))
    return build.tree()


def by_layout(path, layout):
    commkit.init_process_group("gloo", topology=path, layout=layout)
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, os.environ["COMMKIT_HOST_ID"])
    found = (
        dist.get_rank(),
        os.environ["RANK"],
        names,
        dist.get_process_group_ranks(commkit.get_group("dp")),
    )
    commkit.destroy_process_group()
    return found


@pytest.mark.parametrize("layout", ["tp=2,dp=2,pp=2", {"dp": [[0, 2], [1, 3], [4, 6], [5, 7]]}])
def test_a_fabric_and_a_layout_put_neighbours_under_one_switch(tmp_path, layout):
    path = tmp_path / "fabric.toml"
    path.write_text(write(fabric([f"host-{i}" for i in range(4)]), "toml"))
    found = torch_jobs.run(by_layout, 8, str(path), layout, hosts=4, log_dir=tmp_path)
    ranks = [row[0] for row in found]
    assert sorted(ranks) == list(range(8)) and [int(row[1]) for row in found] == ranks
    assert all(row[2] == found[0][2] for row in found)
    # The hosts of a dp group are under one leaf: both even or both odd.
    hosts = found[0][2]
    for _, _, _, group in found:
        assert len({int(hosts[rank][-1]) % 2 for rank in group}) == 1, hosts


def test_what_rank_0_cannot_place_is_an_error_of_every_rank(tmp_path):
    path = tmp_path / "fabric.toml"
    path.write_text(write(fabric(["other-0", "other-1"]), "toml"))
    with torch_jobs.Job(4, hosts=2, log_dir=tmp_path) as job:
        for rank in range(4):
            job.start(rank, by_layout, str(path), "tp=2,dp=2")
        outcomes = job.outcomes()
    assert {outcome.error for outcome in outcomes.values()} == {"NoTopology"}
    assert len({outcome.text for outcome in outcomes.values()}) == 1
    assert "host-0" in outcomes[3].text


SCRIPT = f"""
import json, os, sys
before = [os.environ.get(name) for name in {VARIABLES}]
import torch.distributed as dist
dist.init_process_group("gloo")
names = [None] * dist.get_world_size()
dist.all_gather_object(names, os.environ["COMMKIT_HOST_ID"])
found = [dist.get_rank(), before, names, os.environ["COMMKIT_HOST_ID"]]
fd = os.open(os.environ["RESULTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(fd, (json.dumps(found) + "\\n").encode())
dist.destroy_process_group()
"""


def test_commkit_run_rewrites_rank_below_torchrun_before_the_script_reads_it(tmp_path, repository):
    """The rendezvous c10d gives nodes numbers of its own: the file goes by the hosts' names."""
    path = placement(tmp_path / "perm.json", [1, 0], HOSTS[:2])
    (tmp_path / "train.py").write_text(SCRIPT)
    port = torch_jobs.free_port()
    where = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=r")
    nodes = []
    for node in (0, 1):
        nodes.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--monitor-interval=0.1",
                    "--nnodes=2",
                    "--nproc-per-node=2",
                    *where,
                    "-m",
                    "commkit",
                    "run",
                    "train.py",
                ],
                cwd=tmp_path,
                env={
                    **os.environ,
                    "PYTHONPATH": str(repository),
                    "OMP_NUM_THREADS": "1",
                    "RESULTS": str(tmp_path / "results"),
                    "COMMKIT_LOG_DIR": str(tmp_path),
                    "COMMKIT_HOST_ID": f"host-{node}",
                    "COMMKIT_TOPOLOGY": path,
                },
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        errors = [node.communicate(timeout=90)[1] for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                node.terminate()
                node.wait()
    assert [node.returncode for node in nodes] == [0, 0], errors
    found = sorted(map(json.loads, (tmp_path / "results").read_text().splitlines()))
    names = ["host-1", "host-1", "host-0", "host-0"]
    for rank, (got, variables, hosts, host) in enumerate(found):
        assert (got, hosts, host) == (rank, names, names[rank])
        assert variables == [str(rank), str(rank % 2), str(rank // 2), str(rank), "4"]


#: Before the worker of mpi_jobs, which joins by what launch.resolve says.
MOVED = """
import os
os.environ["COMMKIT_HOST_ID"] = "host-" + str(int(os.environ["PMI_RANK"]) // 2)
from commkit import launch, reorder, settings
found = launch.resolve()
chosen = settings.load()
spec, _ = reorder.apply(found, reorder.load(None, chosen), None, chosen, 0.0)
launch.resolve = lambda: spec
"""


@pytest.mark.mpiexec
def test_moved_ranks_find_the_root_by_mpi_on_the_host_of_the_launcher_s_rank_0(
    tmp_path, repository, mpiexec
):
    path = placement(tmp_path / "perm.json", [1, 0], HOSTS[:2])
    mpi = Mpiexec("mpich", mpiexec, repository, tmp_path)
    mpi.env["COMMKIT_TOPOLOGY"] = path
    try:
        found = mpi.python(4, hide_local=True, before=MOVED).results()
    finally:
        mpi.close()
    assert [line["rank"] for line in found] == [0, 1, 2, 3]
    assert [line["local"] for line in found] == [0, 1, 0, 1]
    assert {line["root"] for line in found} == {"mpi"} and {line["hosts"] for line in found} == {2}
    assert all(line["names"][0].startswith("0 of ") for line in found)
