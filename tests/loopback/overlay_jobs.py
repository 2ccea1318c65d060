"""Real ranks for tests of the agent tree: processes forked from a small server without torch.

A body is a module-level function of a test file; it is called in every rank as body(me, ...) with
the environment that a launcher would give it.  Ranks and test tell one another where they are
(`say`, `hear`, `tell`, `expect`), so that faults happen at a step and not after a sleep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing.connection
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from commkit import launch, overlay

#: Inherited by agents too: tells a job's agents from those of everybody else on this machine.
JOB_VARIABLE = "OVERLAY_TEST_JOB"
#: Chooses the agent program for all jobs, over what a test asks for.
AGENT_VARIABLE = "OVERLAY_TEST_AGENT"
AGENTS_GONE_SECONDS = 5.0
HERE = Path(__file__).resolve().parent

Connection = multiprocessing.connection.Connection


def free_port() -> int:
    """A port below the ephemeral range: no connection of somebody else takes it meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port


@dataclasses.dataclass
class Outcome:
    value: Any = None
    error: str = ""  # the name of the exception's class
    text: str = ""
    trace: str = ""
    exit_code: int | None = None  # negative: killed by that signal
    seconds: float = 0.0  # of the body


class Me:
    """What a body knows of itself and of the test."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.notices: list[tuple[str, str]] = []

    def spec(self, **options: Any) -> launch.LaunchSpec:
        return launch.resolve(**options)

    def join(self, timeout: float = 20.0, **options: Any) -> overlay.World:
        def notice(kind: str, text: str) -> None:
            self.notices.append((kind, text))

        return overlay.join(self.spec(**options), timeout, notice=notice)

    def say(self, value: object = None) -> None:
        self._pipe.send(("say", value))

    def hear(self, timeout: float = 40.0) -> Any:
        if not self._pipe.poll(timeout):
            raise AssertionError(f"rank {self.rank} heard nothing from the test for {timeout} s")
        return self._pipe.recv()

    def meet(self, value: object = None) -> Any:
        """Says that this rank is here and waits until the test lets it go on."""
        self.say(value)
        return self.hear()


def until(condition: Callable[[], Any], seconds: float = 10.0, what: str = "") -> Any:
    """The first true value of `condition`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what or condition}")
        time.sleep(0.01)


# --- The server ------------------------------------------------------------------------------


def _become(request: dict[str, Any], descriptor: int) -> None:
    """The rank.  Comes back as any program ends: by returning, or by an exception."""
    os.environ.clear()
    os.environ.update(request["env"])
    errors = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(errors, 2)
    os.close(errors)
    pipe = Connection(descriptor)
    overlay.AGENT = Path(request["agent"])
    started = time.monotonic()
    outcome = Outcome()
    try:
        body = getattr(importlib.import_module(request["module"]), request["name"])
        outcome.value = body(Me(pipe), *request["arguments"])
    except BaseException as error:
        outcome.error, outcome.text = type(error).__name__, str(error)
        outcome.trace = traceback.format_exc()
        raise
    finally:
        outcome.seconds = time.monotonic() - started
        with contextlib.suppress(OSError):
            pipe.send(("done", outcome))
        pipe.close()


def _serve(channel: socket.socket) -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([channel, reading], [], [])
        if reading in ready:
            os.read(reading, 65536)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    code = os.waitstatus_to_exitcode(ended[1])
                    channel.send(f"{ended[0]} {code}".encode())
        if channel not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 1)
        if not message:
            return
        request = multiprocessing.connection._ForkingPickler.loads(message)
        importlib.import_module(request["module"])  # once, before the fork
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for descriptor in (reading, writing, channel.detach()):
                os.close(descriptor)
            return _become(request, descriptors[0])
        os.close(descriptors[0])
        channel.send(f"{pid} started".encode())


class Server:
    """Forks ranks and tells how they ended."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-B", str(Path(__file__).resolve()), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the test
        )
        theirs.close()
        self._channel = ours
        self._started: list[int] = []
        self.codes: dict[int, int] = {}

    def pump(self, seconds: float) -> None:
        ready, _, _ = select.select([self._channel], [], [], seconds)
        if not ready:
            return
        message = self._channel.recv(256)
        if not message:
            raise AssertionError("the rank server has ended")
        pid, word = message.decode().split()
        if word == "started":
            self._started.append(int(pid))
        else:
            self.codes[int(pid)] = int(word)

    def start(self, request: dict[str, Any], descriptor: int) -> int:
        message = multiprocessing.connection._ForkingPickler.dumps(request)
        socket.send_fds(self._channel, [message], [descriptor])
        while not self._started:
            self.pump(30.0)
        return self._started.pop()

    def close(self) -> None:
        self._channel.close()
        self._process.wait(10)


# --- The test's side -------------------------------------------------------------------------


@dataclasses.dataclass
class Rank:
    pid: int
    pipe: Connection
    said: list[Any] = dataclasses.field(default_factory=list)
    outcome: Outcome | None = None


class Job:
    """Ranks of one world.  `hosts` is a list of how many ranks each simulated host has."""

    def __init__(
        self,
        server: Server,
        directory: Path,
        hosts: list[int],
        *,
        env: dict[str, str] | None = None,
        agent: str | Path | None = None,
        deadline: float = 45.0,
    ) -> None:
        self.server, self.directory, self.hosts = server, directory, hosts
        self.world = sum(hosts)
        self.deadline = time.monotonic() + deadline
        self.id = uuid.uuid4().hex
        self.agent = os.environ.get(AGENT_VARIABLE) or str(agent or overlay.AGENT)
        self.env = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "COMMKIT_JOB_ID": f"test-{self.id}",
            "COMMKIT_LOG_DIR": str(directory),
            **(env or {}),
        }
        self.ranks: dict[object, Rank] = {}

    def host_of(self, rank: int) -> int:
        host = 0
        while rank >= self.hosts[host]:
            rank -= self.hosts[host]
            host += 1
        return host

    def environment(self, rank: int, host: int) -> dict[str, str]:
        kept = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "PYTEST_RUN_OF_COMMKIT")
        return {
            **{name: os.environ[name] for name in kept if name in os.environ},
            "ASAN_OPTIONS": f"log_path={self.directory}/sanitizer",
            "UBSAN_OPTIONS": f"log_path={self.directory}/sanitizer:print_stacktrace=1",
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "COMMKIT_HOST_ID": f"host-{host}",
            JOB_VARIABLE: self.id,
            **self.env,
        }

    def start(
        self,
        rank: int,
        body: Callable[..., Any],
        *arguments: Any,
        host: int | None = None,
        label: object = None,
        env: dict[str, str] | None = None,
        agent: str | None = None,
    ) -> Rank:
        """`label` names the process where two claim one rank; an empty value unsets a variable."""
        environment = self.environment(rank, self.host_of(rank) if host is None else host)
        environment = {k: v for k, v in {**environment, **(env or {})}.items() if v != ""}
        key = rank if label is None else label
        ours, theirs = multiprocessing.Pipe()
        request = {
            "env": environment,
            "module": body.__module__,
            "name": body.__name__,
            "arguments": arguments,
            "agent": agent or self.agent,
            "stderr": str(self.directory / f"rank-{key}.err"),
        }
        pid = self.server.start(request, theirs.fileno())
        theirs.close()
        self.ranks[key] = Rank(pid, ours)
        return self.ranks[key]

    def start_all(self, body: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        for rank in range(self.world):
            self.start(rank, body, *arguments, **options)

    def _receive(self, rank: Rank) -> None:
        try:
            kind, value = rank.pipe.recv()
        except (EOFError, ConnectionResetError):
            kind, value = "done", Outcome(error="Died")
        if kind == "say":
            rank.said.append(value)
            return
        rank.outcome = value

    def expect(self, *keys: object, seconds: float = 30.0) -> list[Any]:
        """What each of these ranks says next."""
        deadline = min(self.deadline, time.monotonic() + seconds)
        for key in keys:
            rank = self.ranks[key]
            while not rank.said:
                if rank.outcome is not None:
                    raise AssertionError(f"rank {key} ended instead: {self._story(key)}")
                if not rank.pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise AssertionError(f"rank {key} says nothing; {self._logs()}")
                self._receive(rank)
        return [self.ranks[key].said.pop(0) for key in keys]

    def tell(self, *keys: object, value: object = None) -> None:
        for key in keys:
            self.ranks[key].pipe.send(value)

    def kill(self, key: object, number: int = signal.SIGKILL) -> None:
        os.kill(self.ranks[key].pid, number)

    def outcomes(self, *keys: object) -> dict[Any, Outcome]:
        """How these ranks (default: all) ended; fails if one outlives the deadline."""
        wanted = keys or tuple(self.ranks)
        for key in wanted:
            rank = self.ranks[key]
            while rank.outcome is None:
                if not rank.pipe.poll(max(0.0, self.deadline - time.monotonic())):
                    raise AssertionError(f"rank {key} is still running; {self._logs()}")
                self._receive(rank)
            while rank.pid not in self.server.codes:
                if time.monotonic() > self.deadline:
                    raise AssertionError(f"rank {key} said its last word and does not end")
                self.server.pump(1.0)
            rank.outcome.exit_code = self.server.codes[rank.pid]
        return {key: outcome for key in wanted if (outcome := self.ranks[key].outcome) is not None}

    def values(self, *keys: object) -> list[Any]:
        """What the bodies of these ranks (default: all, in order) returned; an error fails."""
        outcomes = self.outcomes(*keys)
        for key, outcome in outcomes.items():
            assert not outcome.error, self._story(key)
        return [outcome.value for outcome in outcomes.values()]

    def _story(self, key: object) -> str:
        outcome = self.ranks[key].outcome
        assert outcome is not None
        return f"rank {key}: {outcome.error}: {outcome.text}\n{outcome.trace}\n{self._logs()}"

    def _logs(self) -> str:
        parts = [
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.directory.glob("agent-*.log"))
        ]
        return "\n".join(parts)[-12000:]

    def log_text(self, host: int | None = None) -> str:
        """What the agents (default: of every host) have logged."""
        texts = (p.read_text(errors="replace") for p in sorted(self.directory.glob("agent-*.log")))
        mark = "" if host is None else f" of host host-{host},"
        return "\n".join(text for text in texts if mark in text)

    def agents(self) -> dict[int, str]:
        """pid -> host id of the living agents of this job."""
        found = {}
        wanted = f"{JOB_VARIABLE}={self.id}".encode()
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                name = Path(f"/proc/{entry}/comm").read_text().strip()
                if name != "commkit-agent":
                    continue
                variables = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if wanted in variables:
                hosts = [v for v in variables if v.startswith(b"COMMKIT_HOST_ID=")]
                found[int(entry)] = hosts[0].partition(b"=")[2].decode() if hosts else ""
        return found

    def agent_of(self, host: int) -> int:
        """pid of this host's agent."""
        return until(
            lambda: next((p for p, name in self.agents().items() if name == f"host-{host}"), 0),
            what=f"an agent of host-{host}",
        )

    def wait_for_agents_to_leave(self) -> None:
        until(
            lambda: not self.agents(),
            AGENTS_GONE_SECONDS,
            f"agents leave after their last rank: {self.agents()}\n{self._logs()}",
        )

    def findings(self) -> str:
        """What the sanitizers wrote."""
        reports = sorted(self.directory.glob("sanitizer.*"))
        return "\n".join(path.read_text(errors="replace") for path in reports)

    def close(self) -> None:
        for rank in self.ranks.values():
            if rank.pid not in self.server.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        for rank in self.ranks.values():
            rank.pipe.close()
            while rank.pid not in self.server.codes and time.monotonic() < deadline:
                self.server.pump(1.0)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()
        try:
            if kind is None:
                self.wait_for_agents_to_leave()
        finally:
            for pid in self.agents():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                    os.kill(pid, signal.SIGKILL)
        assert not (found := self.findings()), found


@contextlib.contextmanager
def running_server() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.close()


if __name__ == "__main__":
    # Bodies import this file under its own name: one copy, not two.
    import overlay_jobs

    overlay_jobs._serve(socket.socket(fileno=int(sys.argv[1])))
