"""Ranks without torch under a real torchrun: its store, its restarts, and variables it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch_jobs

pytestmark = pytest.mark.timeout(120)

#: What a worker of every test does; each line that it writes is one attempt of one rank.
WORKER = """
import json, os, signal, sys
from commkit import launch, overlay
from commkit.errors import CommkitError

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
spec = launch.resolve()
victim = spec.rank == 1 and attempt == 0
if victim and "joining" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
notices = []
world = overlay.join(spec, 60.0, notice=lambda kind, text: notices.append(text))
me = world.identity
names = world.all_gather(b"%d" % me.rank)
assert [int(name) for name in names] == list(range(me.world_size))
found = {"attempt": attempt, "rank": me.rank, "world": me.world_size, "epoch": me.epoch,
         "local": me.local_rank, "hosts": me.hosts, "root": spec.root.kind,
         "launcher": spec.launcher, "log": me.agent_log}
fd = os.open(os.environ["RESULTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(fd, (json.dumps(found) + "\\n").encode())
if "formed" in sys.argv:
    world.barrier(timeout=30.0)
    if victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == 0:
        try:
            world.barrier(timeout=30.0)
        except CommkitError as error:
            found["error"], found["text"] = type(error).__name__, str(error)
            os.write(fd, (json.dumps(found) + "\\n").encode())
            # torchrun sees the death of rank 1, not ours, as the reason to start again.
            signal.pause()
world.leave()
"""


@pytest.fixture
def torchrun(repository, tmp_path):
    """Starts torchrun with flags and the worker's arguments; `.results()` when it has ended."""
    started = []

    class Torchrun:
        def __init__(self, *flags, worker=(), **env):
            (tmp_path / "worker.py").write_text(WORKER)
            path = os.pathsep.join(filter(None, (str(repository), os.environ.get("PYTHONPATH"))))
            command = (sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1")
            self.process = subprocess.Popen(
                (*command, *flags, "worker.py", *worker),
                cwd=tmp_path,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "OMP_NUM_THREADS": "1",
                    "RESULTS": str(tmp_path / "results"),
                    "COMMKIT_LOG_DIR": str(tmp_path),
                    **env,
                },
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append(self.process)

        def results(self):
            _, errors = self.process.communicate(timeout=90)
            assert self.process.returncode == 0, errors
            lines = (tmp_path / "results").read_text().splitlines()
            return sorted(map(json.loads, lines), key=lambda r: (r["attempt"], r["rank"]))

    yield Torchrun
    for process in started:
        # SIGTERM, so that it ends its workers too.
        if process.poll() is None:
            process.terminate()
        process.communicate()


def of(results, key, attempt=0):
    return [found[key] for found in results if found["attempt"] == attempt]


def test_standalone_starts_four_ranks_of_one_host(torchrun):
    found = torchrun("--standalone", "--nproc-per-node=4").results()
    assert of(found, "rank") == of(found, "local") == [0, 1, 2, 3]
    assert of(found, "launcher") == ["torchrun"] * 4
    assert of(found, "hosts") == [1] * 4
    assert len(set(of(found, "epoch"))) == 1


def test_static_rendezvous_leaves_master_port_to_torchrun_s_store(torchrun):
    """Two agents: the second host can only find the root through torchrun's store."""
    port = torch_jobs.free_port()
    common = ("--nnodes=2", "--nproc-per-node=2", f"--master-port={port}")
    common += ("--master-addr=127.0.0.1",)
    hosts = [
        torchrun(*common, f"--node-rank={node}", COMMKIT_HOST_ID=f"host-{node}") for node in (0, 1)
    ]
    hosts[1].results()
    found = hosts[0].results()
    assert of(found, "rank") == [0, 1, 2, 3]
    assert of(found, "local") == [0, 1, 0, 1]
    assert of(found, "root") == ["elastic"] * 4
    assert of(found, "hosts") == [2] * 4
    text = Path(found[0]["log"]).read_text()
    assert "published in torchrun's store" in text
    assert f"listening on port {port}," not in text


@pytest.mark.parametrize("when", ["joining", "formed"])
def test_a_restarted_world_is_a_new_epoch(torchrun, when):
    # A slow monitor, so that the survivors have time to write down what they were told.
    flags = ("--standalone", "--nproc-per-node=3", "--max-restarts=1", "--monitor-interval=1")
    found = torchrun(*flags, worker=(when,)).results()
    again = set(of(found, "epoch", attempt=1))
    assert of(found, "rank", attempt=1) == [0, 1, 2]
    assert len(again) == 1
    if when == "joining":
        assert of(found, "rank", attempt=0) == []
        return
    first = [line for line in found if line["attempt"] == 0]
    assert len({line["epoch"] for line in first}) == 1
    assert not again & {line["epoch"] for line in first}
    told = [line for line in first if "error" in line]
    assert told, "no survivor was told before torchrun ended it"
    for line in told:
        assert line["error"] == "RankDied"
        assert line["text"].startswith("rank 1 (pid ") and "killed" in line["text"]


@pytest.fixture
def stale(repository, tmp_path):
    """Two ranks on two "hosts" whose TORCHELASTIC_* variables come from an earlier torchrun."""
    (tmp_path / "worker.py").write_text(WORKER)
    port = str(torch_jobs.free_port())
    processes = []

    def start(**env):
        for rank in (0, 1):
            mine = {"RANK": str(rank), "COMMKIT_HOST_ID": f"host-{rank}"}
            shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
            shared |= {"RESULTS": str(tmp_path / "results"), "COMMKIT_LOG_DIR": str(tmp_path)}
            processes.append(
                subprocess.Popen(
                    (sys.executable, "worker.py"),
                    cwd=tmp_path,
                    env={**os.environ, "PYTHONPATH": str(repository), **shared, **mine, **env},
                )
            )
        assert [process.wait(timeout=60) for process in processes] == [0, 0]
        return [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("run_id", ["", "left-over"])
def test_a_stale_agent_store_variable_with_nobody_listening_is_found_out(stale, run_id):
    found = stale(TORCHELASTIC_RUN_ID=run_id)
    assert sorted(of(found, "rank")) == [0, 1]
    assert of(found, "root") == ["elastic"] * 2
    assert of(found, "hosts") == [2, 2]
    logs = "".join(Path(path).read_text() for path in of(found, "log"))
    assert "TORCHELASTIC_USE_AGENT_STORE is set, but no store answers at 127.0.0.1:" in logs
    assert "the variable is stale" in logs
