"""commkit bench preflight on hosts of which two cannot reach each other."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ranks import environment

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(120)]


def preflight(fabric, hosts, tmp_path, **of_rank):
    """(exit codes, what rank 0 printed)."""
    processes = []
    for rank, host in enumerate(hosts):
        more = of_rank.get(f"rank{rank}", {})
        processes.append(
            fabric.popen(
                host.command(sys.executable, "-m", "commkit", "bench", "preflight"),
                env=environment(
                    RANK=str(rank),
                    WORLD_SIZE=str(len(hosts)),
                    LOCAL_RANK="0",
                    LOCAL_WORLD_SIZE="1",
                    MASTER_ADDR="10.77.0.1",
                    MASTER_PORT="29500",
                    COMMKIT_LOG_DIR=str(tmp_path),
                    **more,
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    done = [process.communicate(timeout=60) for process in processes]
    assert [out for out, _ in done[1:]] == [""] * (len(hosts) - 1)
    assert [err for _, err in done] == [""] * len(hosts)
    return [process.returncode for process in processes], done[0][0]


def test_two_hosts_that_cannot_reach_each_other_are_named_within_seconds(fabric, tmp_path):
    gpu = fabric.hosts(3)
    # The agents are a tree under the first host: the world forms, and a library would hang.
    gpu[2].ignore("10.77.0.2")
    codes, text = preflight(fabric, gpu, tmp_path, rank1={"NCCL_ALGO": "Ring"})
    assert codes == [3, 3, 3]
    assert "# warning: NCCL_ALGO is unset on rank 0, Ring on rank 1" in text
    lines = [line for line in text.splitlines() if "cannot reach" in line]
    assert len(lines) == 2
    assert lines[0].startswith("commkit: gpu-2 (rank 1) cannot reach gpu-3 (rank 2) at 10.77.0.3:")
    assert lines[1].startswith("commkit: gpu-3 (rank 2) cannot reach gpu-2 (rank 1) at 10.77.0.2:")
    assert all(line.endswith("no answer in 3 s") for line in lines)


def test_hosts_that_reach_each_other_pass(fabric, tmp_path):
    codes, text = preflight(fabric, fabric.hosts(3), tmp_path)
    assert codes == [0, 0, 0]
    assert "# preflight: 3 ranks on 3 hosts joined the agent tree" in text
    assert "# every host reaches every other (" in text
