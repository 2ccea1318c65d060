"""torchrun and mpiexec that span hosts: one launcher a host, or one that reaches the others."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from ranks import environment, variables_of

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(120)]

WORKER = """
import json, os, socket
from commkit import launch, overlay
spec = launch.resolve()
world = overlay.join(spec, 40.0)
me = world.identity
names = world.all_gather(f"{me.rank}@{socket.gethostname()}".encode(), timeout=20.0)
line = {"rank": me.rank, "local": me.local_rank, "hosts": me.hosts, "epoch": me.epoch,
        "root": spec.root.kind, "names": [name.decode() for name in names]}
os.write(1, (json.dumps(line) + "\\n").encode())
world.leave()
"""


def start(fabric, host, tmp_path, *command, **env):
    return fabric.popen(
        host.command(*command),
        env=environment(COMMKIT_LOG_DIR=str(tmp_path), **env),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results(*processes):
    found = []
    for process in processes:
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        found += map(json.loads, out.splitlines())
    return sorted(found, key=lambda line: line["rank"])


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_one_torchrun_a_host(fabric, tmp_path, rendezvous):
    gpu = fabric.hosts(2)
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    processes = []
    for node, host in enumerate(gpu):
        if rendezvous == "c10d":
            flags = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-id=job"]
            flags += ["--rdzv-backend=c10d", "--rdzv-endpoint=gpu-1:29400"]
            env = {}
        else:
            # As Kubeflow asks for it, and for the static rendezvous with it.
            flags = []
            env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": str(node)}
            env |= {"PET_MASTER_ADDR": "gpu-1", "PET_MASTER_PORT": "29400"}
        command = (sys.executable, "-m", "torch.distributed.run", *flags, worker)
        processes.append(start(fabric, host, tmp_path, *command, **env))
    found = results(*processes)
    assert [line["rank"] for line in found] == [0, 1, 2, 3]
    assert [line["local"] for line in found] == [0, 1, 0, 1]
    assert {(line["hosts"], line["root"]) for line in found} == {(2, "elastic")}
    assert len({line["epoch"] for line in found}) == 1
    # c10d numbers the hosts as they come; ranks of a host are neighbours.
    (names,) = {tuple(line["names"]) for line in found}
    hosts = [name.partition("@")[2] for name in names]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]


#: What Hydra and Open MPI call in place of ssh: [-x] HOST COMMAND...
REMOTE_SHELL = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec ip netns exec {prefix}$host unshare --uts sh -c 'hostname "$0" && eval "$*"' $host "$@"
"""


def flags_of(mpi, program, shell):
    """(flags, variables) that make an mpiexec start two ranks on each of three hosts."""
    if mpi == "mpich":
        hosts = ("-hosts", "gpu-1,gpu-2,gpu-3", "-ppn", "2", "-n", "6")
        return ("-launcher", "ssh", "-launcher-exec", shell, *hosts), {"FI_PROVIDER": "tcp"}
    flags = ("--prtemca", "plm_ssh_agent", shell, "--host", "gpu-1:2,gpu-2:2,gpu-3:2")
    flags += ("-n", "6", "--map-by", "ppr:2:node")
    flags += ("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp")
    return flags, variables_of(program)


@pytest.mark.parametrize("root", ["mpi", "endpoint"])
@pytest.mark.parametrize(
    "mpi",
    [
        pytest.param("mpich", marks=pytest.mark.mpiexec),
        pytest.param("openmpi", marks=pytest.mark.openmpi),
    ],
)
def test_one_mpiexec_starts_hosts_that_find_the_root(request, fabric, tmp_path, mpi, root):
    """By one broadcast of mpi4py, or where MASTER_ADDR and MASTER_PORT are exported."""
    program = request.getfixturevalue("mpiexec" if mpi == "mpich" else "openmpi")
    gpu = fabric.hosts(3)
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    shell = tmp_path / "shell"
    shell.write_text(REMOTE_SHELL.format(prefix=fabric.prefix))
    shell.chmod(0o755)
    flags, env = flags_of(mpi, program, shell)
    if root == "endpoint":
        master = {"MASTER_ADDR": "gpu-1", "MASTER_PORT": "29500"}
        export = [f for name in master for f in ("-x", name)] if mpi == "openmpi" else []
        flags, env = (*flags, *export), {**env, **master}
    command = (program, *flags, sys.executable, worker)
    found = results(start(fabric, gpu[0], tmp_path, *command, **env))
    assert [line["local"] for line in found] == [0, 1, 0, 1, 0, 1]
    assert {(line["hosts"], line["root"]) for line in found} == {(3, root)}
    (names,) = {tuple(line["names"]) for line in found}
    assert list(names) == [f"{rank}@gpu-{rank // 2 + 1}" for rank in range(6)]
