"""Real ranks for tests: processes forked from a server that has imported torch once.

A body is a module-level function of a test file; it runs in every rank with the environment that a
launcher would give it, and what it returns or raises comes back as an Outcome.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback
import uuid

from commkit import _C

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.nn.parallel", "commkit.api"])


@dataclasses.dataclass(frozen=True)
class Outcome:
    value: object = None
    error: str = ""  # the name of the exception's class
    text: str = ""
    trace: str = ""
    exit_code: int = 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def own_output(text):
    """Without the lines that gloo of torch 2.8 to 2.10 writes there when it connects."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[Gloo] Rank "))


def _count(ranges):
    """The number of ranks in `0-2, 5`."""
    total = 0
    for part in ranges.replace(",", " ").split():
        low, _, high = part.partition("-")
        total += int(high or low) - int(low) + 1
    return total


def _child(pipe, environment, body, arguments):
    os.environ.update(environment)
    try:
        outcome = Outcome(value=body(*arguments))
    except BaseException as error:
        outcome = Outcome(error=type(error).__name__, text=str(error), trace=traceback.format_exc())
    pipe.send(outcome)


class Job:
    """Ranks of one world.  `with Job(world) as job: job.start(rank, body); job.outcomes()`."""

    def __init__(self, world, *, hosts=1, env=None, log_dir=None, deadline=50.0):
        self.world, self.hosts = world, hosts
        self.deadline = time.monotonic() + deadline
        self.env = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "COMMKIT_JOB_ID": f"test-{uuid.uuid4().hex}",
            "OMP_NUM_THREADS": "1",
            **({"COMMKIT_LOG_DIR": str(log_dir)} if log_dir else {}),
            **(env or {}),
        }
        self.log_dir = str(log_dir)
        self.processes = {}
        self._pipes = {}

    def environment(self, rank):
        local = self.world // self.hosts
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(rank % local),
            "LOCAL_WORLD_SIZE": str(local),
            **self.env,
        }
        if self.hosts > 1:
            env["COMMKIT_HOST_ID"] = f"host-{rank // local}"
        return env

    def start(self, rank, body, *arguments, label=None, env=None):
        """`label` names the process where two of them claim the same rank."""
        ours, theirs = _context.Pipe(duplex=False)
        environment = {**self.environment(rank), **(env or {})}
        # An empty value stands for a variable that this rank does not have.
        environment = {name: value for name, value in environment.items() if value != ""}
        process = _context.Process(target=_child, args=(theirs, environment, body, arguments))
        process.start()
        theirs.close()
        key = rank if label is None else label
        self.processes[key], self._pipes[key] = process, ours

    def agents(self):
        """The agents of this job that are alive now."""
        return [agent for agent in _C.agents() if agent.get("log", "").startswith(self.log_dir)]

    def wait_for_ranks(self, count):
        """Returns when `count` ranks have come to their hosts' agents."""
        while time.monotonic() < self.deadline:
            texts = [agent.get("ranks", "") for agent in self.agents()]
            if sum(_count(text) for text in texts) >= count:
                return
            time.sleep(0.02)
        raise AssertionError(f"{count} ranks did not come; there are {texts}")

    def outcomes(self):
        """What every started process returned or raised; fails if one outlives the deadline."""
        results = {}
        while len(results) < len(self.processes):
            waiting = {self._pipes[key]: key for key in self.processes if key not in results}
            ready = multiprocessing.connection.wait(
                list(waiting), max(0.0, self.deadline - time.monotonic())
            )
            if not ready:
                ended = dict(sorted(results.items()))
                raise AssertionError(
                    f"still running at the deadline: {sorted(waiting.values())}; ended: {ended}"
                )
            for pipe in ready:
                key = waiting[pipe]
                try:
                    results[key] = pipe.recv()
                except EOFError:
                    self.processes[key].join(10)
                    results[key] = Outcome(
                        error="Died", exit_code=self.processes[key].exitcode or 0
                    )
        for process in self.processes.values():
            process.join(max(1.0, self.deadline - time.monotonic()))
        return results

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join(10)
        for pipe in self._pipes.values():
            pipe.close()


def run(body, world, *arguments, **options):
    """Runs `body` in `world` ranks and returns their values in rank order; any error fails."""
    with Job(world, **options) as job:
        for rank in range(world):
            job.start(rank, body, *arguments)
        outcomes = job.outcomes()
    for rank, outcome in sorted(outcomes.items()):
        assert not outcome.error, f"rank {rank}: {outcome.error}: {outcome.text}\n{outcome.trace}"
    return [outcomes[rank].value for rank in range(world)]
