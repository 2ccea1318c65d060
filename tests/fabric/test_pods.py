"""Jobs of four pods with the variables that operators give them and a cluster's DNS.

A pod's name is unknown to the DNS until the pod is ready, and pods start in any order: here rank 0
comes last, after the others have been told that its name does not exist.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nameserver import Nameserver
from ranks import RANK, environment

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(120)]

RECORDED = Path(__file__).resolve().parent.parent / "recorded" / "pods"
#: What kubelet writes for a pod of namespace NAMESPACE.
SEARCH = "search {0}.svc.cluster.local svc.cluster.local cluster.local"


class Pods:
    def __init__(self, fabric, nameserver, name, log_dir):
        recorded = json.loads((RECORDED / f"{name}.json").read_text())
        self.fabric, self.nameserver, self.log_dir = fabric, nameserver, log_dir
        self.environments = recorded["environments"]
        self.names = {rank: name for name, rank in recorded["names"].items()}
        self.hosts, self.processes = {}, {}
        for rank, env in enumerate(self.environments):
            full = self.names[rank]
            host = fabric.host(env["HOSTNAME"], f"10.77.0.{rank + 1}/24")
            # A pod knows itself; all others are the DNS's business.
            host.set_hosts(f"10.77.0.{rank + 1} {full} {env['HOSTNAME']}")
            namespace = full.removesuffix(".svc.cluster.local").rpartition(".")[2]
            host.set_resolver(SEARCH.format(namespace), "options ndots:5")
            self.hosts[rank] = host

    def start(self, *ranks):
        python = environment()["PYTHONPATH"]
        for rank in ranks:
            env = {"PYTHONPATH": python, "JOIN_SECONDS": "60", "COMMKIT_LOG_DIR": str(self.log_dir)}
            # The fabric's own tools are on PATH, and conftest.py looks for this run's variable.
            kept = {n: v for n, v in os.environ.items() if n.startswith(("PATH", "PYTEST_RUN"))}
            self.processes[rank] = self.fabric.popen(
                self.hosts[rank].command(sys.executable, RANK, "meet"),
                env={**self.environments[rank], **kept, **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def become_ready(self, *ranks):
        """The DNS learns their names, as it does when a pod's readiness probe succeeds."""
        for rank in ranks:
            self.nameserver.names[self.names[rank]] = f"10.77.0.{rank + 1}"

    def logs(self):
        return "".join(path.read_text() for path in sorted(self.log_dir.glob("agent-*.log")))

    def wait_for_log(self, words):
        deadline = time.monotonic() + 30
        while words not in self.logs():
            assert time.monotonic() < deadline, f"no agent wrote {words!r}:\n{self.logs()}"
            time.sleep(0.02)

    def values(self):
        found = []
        for _, process in sorted(self.processes.items()):
            out, errors = process.communicate(timeout=60)
            last = json.loads(out.splitlines()[-1]) if out else {"text": errors}
            assert "value" in last, f"{last['text']}\n{self.logs()}"
            found.append(last["value"])
        return found


@pytest.mark.parametrize("name", ["pytorchjob", "trainjob", "jobset", "volcano", "leaderworkerset"])
def test_pods_that_start_before_rank_0_and_its_name_meet(fabric, tmp_path, name):
    with Nameserver(fabric, "10.77.0.254") as nameserver:
        pods = Pods(fabric, nameserver, name, tmp_path)
        pods.start(2)
        pods.become_ready(2)
        pods.start(3, 1)
        nameserver.wait_for(pods.names[0], times=6)
        pods.start(0)
        pods.wait_for_log("root of a world of 4 ranks")
        # It runs and is not ready: still nobody finds it.
        nameserver.wait_for(pods.names[0], times=nameserver.asked.count(pods.names[0]) + 3)
        pods.become_ready(0)
        values = pods.values()
    names = [f"{rank}@{env['HOSTNAME']}" for rank, env in enumerate(pods.environments)]
    assert [value["names"] for value in values] == [names] * 4
    assert [value["hosts"] for value in values] == [4] * 4
    assert [value["local"] for value in values] == [[0, 1]] * 4
    assert len({value["epoch"] for value in values}) == 1


def test_a_root_that_has_moved_is_found_though_the_dns_still_knew_its_old_address(fabric, tmp_path):
    """The pod of rank 0 was deleted and made anew: its name leads nowhere for a while."""
    with Nameserver(fabric, "10.77.0.254") as nameserver:
        pods = Pods(fabric, nameserver, "pytorchjob", tmp_path)
        nameserver.names[pods.names[0]] = "10.77.0.99"
        pods.start(1, 2, 3)
        # Whoever asks again has dialled in vain.
        nameserver.wait_for(pods.names[0], times=12)
        pods.start(0)
        pods.wait_for_log("root of a world of 4 ranks")
        pods.become_ready(0)
        values = pods.values()
    assert [value["hosts"] for value in values] == [4] * 4
