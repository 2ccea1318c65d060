"""A rank's client under ThreadSanitizer: many threads on one client, ranks that die, agents too."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import uuid
from pathlib import Path

import overlay_sanitized
import pytest
from overlay_jobs import JOB_VARIABLE, free_port

pytestmark = [
    pytest.mark.sanitizers,
    pytest.mark.timeout(400),  # the first test builds the agent and the rank with the sanitizer
]
RACE_EXIT = 66


@functools.cache
def without_random_addresses() -> list[str]:
    """ThreadSanitizer of older compilers does not start where addresses are too random."""
    setarch = shutil.which("setarch")
    command = [setarch, "-R"] if setarch else []
    works = command and subprocess.run([*command, "true"], capture_output=True).returncode == 0
    return command if works else []


class Ranks:
    """Native ranks of one job, two a host."""

    def __init__(self, directory: Path, world: int, **fields: str) -> None:
        self.directory, self.world = directory, world
        job = uuid.uuid4().hex
        port = str(free_port())
        self.environment = {
            **os.environ,
            "TSAN_OPTIONS": f"log_path={directory}/race exitcode={RACE_EXIT}",
            JOB_VARIABLE: job,
        }
        self.fields = {
            "job_id": f"test-{job}",
            "root_key": port,
            "root_kind": "endpoint",
            "root_host": "localhost",  # looked up in a thread of the agent
            "root_ports": port,
            "machine": "here",
            "world_size": str(world),
            "local_size": "2",
            "log_dir": str(directory),
            "agent": str(overlay_sanitized.thread_agent()),
            **fields,
        }
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, rank: int, **more: str) -> None:
        host = f"host-{rank // 2}"
        fields = {
            **self.fields,
            "rank": str(rank),
            "local_rank": str(rank % 2),
            "host_key": host,
            "host_name": host,
            **more,
        }
        command = [*without_random_addresses(), str(overlay_sanitized.threaded_rank())]
        self.processes[rank] = subprocess.Popen(
            [*command, *(f"{name}={value}" for name, value in fields.items())],
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def ends(self) -> dict[int, tuple[int, str]]:
        """Exit code and output of each rank; no race was found in any rank or agent."""
        out = {}
        try:
            for rank, process in self.processes.items():
                said, wrong = process.communicate(timeout=120)
                out[rank] = (process.returncode, said + wrong)
        finally:
            for process in self.processes.values():
                process.kill()
        races = [path.read_text(errors="replace") for path in self.directory.glob("race.*")]
        assert not races, "\n".join(races)[:20000]
        return out


def counted(said: str) -> dict[str, int]:
    """The numbers of a rank's last line, "done 7 failed 0 ..."."""
    words = said.strip().splitlines()[-1].split()
    return {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}


def test_threads_of_one_client_do_not_race_and_get_right_answers(tmp_path):
    ranks = Ranks(tmp_path, 4)
    for rank in range(4):
        ranks.start(rank, end="leave" if rank < 2 else "close")
    for code, said in ranks.ends().values():
        assert code == 0, said
        counts = counted(said)
        assert counts["done"] > 10 and counts["interrupted"] > 0, said


@pytest.mark.parametrize("end", ["exit", "abort"])
def test_a_rank_that_dies_races_with_nothing_in_those_that_live(tmp_path, end):
    ranks = Ranks(tmp_path, 4)
    for rank in range(3):
        ranks.start(rank, seconds="6", end="leave")
    ranks.start(3, seconds="1", end=end)
    ends = ranks.ends()
    assert ends.pop(3)[0] == (0 if end == "exit" else 3)
    for code, said in ends.values():
        assert code == 0, said
        # Exit code 0 is nobody's failure, but operations of the whole world end.
        assert counted(said)["failed"] > 0
        assert (counted(said)["failures"] > 0) == (end == "abort"), said
