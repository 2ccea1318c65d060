"""Ranks of one world on the hosts of a fabric: started one by one, read line by line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

RANK = Path(__file__).with_name("rank.py")
ROOT = RANK.parent.parent.parent


@dataclasses.dataclass
class Outcome:
    value: dict | None = None
    error: str = ""  # the name of the exception's class
    text: str = ""
    notices: list[str] = dataclasses.field(default_factory=list)


def environment(**more):
    """The variables of this process with `more`; ours is the commkit that is imported."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def variables_of(openmpi):
    """What Open MPI's mpiexec needs, run as root beside the MPICH of this Python's environment."""
    # By itself mpi4py would take the library of its own environment.
    library = Path(openmpi).parents[1] / "lib" / "libmpi.so.40"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {"MPI4PY_LIBMPI": str(library), **root}


class Ranks:
    """`placement` maps hosts to how many ranks each has; ranks are numbered in its order."""

    def __init__(self, fabric, placement, log_dir, *, master, seconds=20.0, under=(), **env):
        # `under` is a command that runs the rank's command, such as a shell that sets a limit.
        self.fabric, self.log_dir, self.under = fabric, log_dir, under
        self.world_size = sum(placement.values())
        self.ranks = {}
        for host, size in placement.items():
            first = len(self.ranks)
            self.ranks |= {first + i: (host, i, size) for i in range(size)}
        self.env = {
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": master,
            "MASTER_PORT": "29500",
            "COMMKIT_LOG_DIR": str(log_dir),
            "JOIN_SECONDS": str(seconds),
            **env,
        }
        self.processes = {}
        self._seen = {}

    def start(self, *hosts, body="meet", ranks=None, under=None, **env):
        """Starts the ranks of `hosts` (none given: of all)."""
        for rank, (host, local, size) in self.ranks.items():
            if (hosts and host not in hosts) or (ranks is not None and rank not in ranks):
                continue
            mine = {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(size)}
            with open(self.log_dir / f"rank-{rank}.err", "w") as errors:
                self.processes[rank] = self.fabric.popen(
                    host.command(*(under or self.under), sys.executable, RANK, body),
                    env=environment(**{**self.env, **mine, **env}),
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            self._seen[rank] = Outcome()
        return self

    def _read(self, rank):
        line = self.processes[rank].stdout.readline()
        seen = self._seen[rank]
        if not line:
            code = self.processes[rank].wait()
            errors = (self.log_dir / f"rank-{rank}.err").read_text()
            assert seen.value is not None or seen.error, f"rank {rank} ended ({code}): {errors}"
            return None
        message = json.loads(line)
        seen.value = message.get("value", seen.value)
        seen.error, seen.text = message.get("error", seen.error), message.get("text", seen.text)
        if "notice" in message:
            seen.notices.append(message["notice"])
        return message

    def formed(self):
        """Returns when every started rank has joined the world."""
        for rank in self.processes:
            while (message := self._read(rank)) and message.get("event") != "formed":
                pass
            assert message, f"rank {rank}: {self._seen[rank]}"
        return self

    def wait_for_notice(self, rank, words):
        while message := self._read(rank):
            if words in message.get("notice", ""):
                return
        raise AssertionError(f"rank {rank} never said {words!r}: {self._seen[rank]}")

    def wait_for_log(self, words):
        """Returns when an agent of the job has written `words` into its log."""
        deadline = time.monotonic() + 20
        while words not in self.logs():
            assert time.monotonic() < deadline, f"no agent wrote {words!r}:\n{self.logs()}"
            time.sleep(0.02)

    def logs(self):
        return "".join(path.read_text() for path in sorted(self.log_dir.glob("agent-*.log")))

    def outcomes(self):
        """What each started rank reported last, in rank order."""
        for rank in sorted(self.processes):
            while self._read(rank) is not None:
                pass
        return [self._seen[rank] for rank in sorted(self.processes)]

    def outcome(self, rank):
        """What this rank reported last."""
        while self._read(rank) is not None:
            pass
        return self._seen[rank]

    def values(self):
        """The values of all ranks; an error of any fails."""
        outcomes = self.outcomes()
        for rank, outcome in zip(sorted(self.processes), outcomes, strict=True):
            assert not outcome.error, f"rank {rank}: {outcome.text}\n{self.logs()}"
        return [outcome.value for outcome in outcomes]

    def meet(self):
        """Every rank starts, meets every other and leaves; the agents by host name."""
        values = self.start().values()
        ranks = [f"{rank}@{host.name}" for rank, (host, _, _) in self.ranks.items()]
        for value, (_, local, size) in zip(values, self.ranks.values(), strict=True):
            assert value["names"] == ranks
            assert value["local"] == [local, size]
        hosts = {host.name for host, _, _ in self.ranks.values()}
        assert {value["hosts"] for value in values} == {len(hosts)}
        assert len({value["epoch"] for value in values}) == 1
        assert max(value["most"] for value in values) == sum(range(self.world_size))
        agents = {
            self.ranks[rank][0].name: value["agent"]
            for rank, value in enumerate(values)
            if value["agent"]
        }
        assert set(agents) == hosts
        return agents
