"""Placements as files for mpiexec, MPICH and Open MPI: ranks are where the plan has them."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from commkit.topology.emit import emit

GIVEN = ["alpha", "beta", "gamma"]
HOST_OF = [2, 0, 1]
PLANNED = {0: "gamma", 1: "gamma", 2: "alpha", 3: "alpha", 4: "beta", 5: "beta"}

#: Stands in for ssh: what should run on the host it names runs here.
HERE = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec sh -c "$*"
"""


@pytest.mark.mpiexec
def test_mpich_puts_ranks_where_the_hostfile_has_them(mpiexec, tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(emit("hostfile", HOST_OF, GIVEN, 2))
    # Hydra's fork launcher starts every host's proxy here.
    flags = ["-launcher", "fork", "-f", hostfile, "-n", "6", "-prepend-pattern", "%r=%h;"]
    done = subprocess.run(
        [mpiexec, *flags, "echo", "here"],
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\d+)=(\w+);", done.stdout)
    assert {int(rank): host for rank, host in found} == PLANNED


@pytest.mark.openmpi
def test_open_mpi_puts_ranks_where_the_rankfile_has_them(openmpi, tmp_path):
    agent = tmp_path / "agent"
    agent.write_text(HERE)
    agent.chmod(0o755)
    hosts, ranks = tmp_path / "hosts", tmp_path / "ranks"
    hosts.write_text(emit("openmpi", HOST_OF, GIVEN, 1))
    # One rank a host: every host here is this one, and slots are its cores.
    ranks.write_text(emit("rankfile", HOST_OF, GIVEN, 1))
    done = subprocess.run(
        [
            openmpi,
            "--hostfile",
            hosts,
            "--map-by",
            f"rankfile:file={ranks}",
            "--display",
            "map",
            "-n",
            "3",
            "true",
        ],
        env={
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_plm_ssh_agent": str(agent),
        },
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = {}
    for block in re.split(r"\nData for node: ", done.stdout)[1:]:
        (host,) = [name for name in GIVEN if f"resolved from {name}\n" in block]
        for rank in re.findall(r"Data for proc: \[[^,]*,(\d+)\]", block):
            found[int(rank)] = host
    assert found == {0: "gamma", 1: "alpha", 2: "beta"}
