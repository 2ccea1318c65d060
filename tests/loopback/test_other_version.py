"""Two versions of commkit that meet: hosts of one job, a rank and an agent, a tool and an agent."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import other_version
import pytest
from overlay_jobs import until
from test_overlay_strangers import frame, hello, listening, text

import commkit
from commkit import _C

ROOT = Path(__file__).resolve().parents[2]
MINE = f"commkit {commkit.__version__} (protocol {_C.protocol_version()})"
OTHER = f"commkit {other_version.RELEASE} (protocol {other_version.PROTOCOL})"

#: One rank without torch; what it is told is the last line of its standard output.
RANK = """
import json, sys
from commkit import launch, overlay
from commkit.errors import CommkitError
try:
    world = overlay.join(launch.resolve(), float(sys.argv[1]), notice=lambda kind, text: None)
    world.barrier(timeout=20)
    print(json.dumps(["joined", world.identity.hosts]), flush=True)
    sys.stdin.readline()
    world.leave(5)
except CommkitError as error:
    print(json.dumps([type(error).__name__, str(error)]), flush=True)
"""


@pytest.fixture(scope="session")
def other():
    return other_version.package_path()


class Ranks:
    """Ranks of one job, each of a version of its own."""

    def __init__(self, job):
        self.job, self.processes = job, []

    def start(self, rank, version, *, host, seconds=20, **env):
        environment = {**self.job.environment(rank, host), **env}
        environment["PYTHONPATH"] = str(version)
        self.processes.append(
            subprocess.Popen(
                [sys.executable, "-B", "-c", RANK, str(seconds)],
                env=environment,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return self.processes[-1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()


def told(process):
    return json.loads(process.stdout.readline())


def two_hosts_meet(job, ranks, root, member, root_seconds):
    """What the root's rank waits for, and the other's; neither test would live to see 600 s."""
    first = ranks.start(0, root, host=0, seconds=root_seconds)
    listening(job)
    return first, ranks.start(1, member, host=1, seconds=600)


@pytest.mark.parametrize("newer", ["root", "other host"])
def test_hosts_with_two_versions_fail_at_once_and_each_names_both(jobs, other, newer):
    root, member = (other, ROOT) if newer == "root" else (ROOT, other)
    at_root, at_member = (OTHER, MINE) if newer == "root" else (MINE, OTHER)
    with jobs([1, 1]) as job, Ranks(job) as ranks:
        first, second = two_hosts_meet(job, ranks, root, member, 600)
        for kind, said in (told(first), told(second)):
            assert kind == "JoinError"
            assert f"host host-1 runs {at_member} and host host-0 runs {at_root}" in said
            assert "install one version on every host" in said


def test_with_a_secret_nothing_is_believed_but_the_deadline_s_error_tells_it(jobs, other):
    secret = {"COMMKIT_SECRET": "correct horse battery"}
    with jobs([1, 1], env=secret) as job, Ranks(job) as ranks:
        first, second = two_hosts_meet(job, ranks, ROOT, other, 6)
        kind, said = told(second)
        assert kind == "JoinError" and MINE in said and OTHER in said
        kind, said = told(first)
        assert kind == "JoinTimeout"
        assert f"host host-1 runs {OTHER} and host host-0 runs {MINE}" in said


def test_another_job_of_another_version_is_a_stranger_and_the_job_forms(jobs, other):
    with jobs([1, 1]) as job, Ranks(job) as ranks:
        first = ranks.start(0, ROOT, host=0)
        listening(job)
        stranger = ranks.start(1, other, host=7, seconds=3, COMMKIT_JOB_ID="somebody-else")
        kind, said = told(stranger)
        assert kind == "JoinTimeout" and f"belongs to job '{job.env['COMMKIT_JOB_ID']}'" in said
        assert f"is of another job (host host-7, {OTHER})" in job.log_text(0)
        second = ranks.start(1, ROOT, host=1)
        assert told(first) == told(second) == ["joined", 2]
        for process in (first, second):
            process.communicate("\n")


@pytest.mark.parametrize("newer", ["agent", "rank"])
def test_a_rank_and_its_host_s_agent_of_two_versions_name_both(jobs, other, newer):
    agent, rank = (other, ROOT) if newer == "agent" else (ROOT, other)
    theirs, mine = (OTHER, _C.protocol_version()) if newer == "agent" else (MINE, 999)
    with jobs([2]) as job, Ranks(job) as ranks:
        first = ranks.start(0, agent, host=0)
        pid = job.agent_of(0)
        second = ranks.start(1, rank, host=0, seconds=600)
        kind, said = told(second)
        assert kind == "OverlayError"
        assert f"the agent on host host-0 (pid {pid}) runs {theirs}" in said
        assert f"pid {second.pid} there protocol {mine};" in said
        assert "commkit agents stop commkit-" in said
        # The agent goes on: a rank of its own version still makes the world.
        third = ranks.start(1, agent, host=0)
        assert told(first) == told(third) == ["joined", 1]
        for process in (first, third):
            process.communicate("\n")


@pytest.mark.parametrize("newer", ["agent", "tool"])
def test_commkit_agents_lists_and_stops_agents_of_another_version(jobs, other, newer):
    agent, tool = (other, ROOT) if newer == "agent" else (ROOT, other)

    def agents(*arguments):
        return subprocess.run(
            [sys.executable, "-B", "-m", "commkit", "agents", *arguments],
            env={**os.environ, "PYTHONPATH": str(tool)},
            cwd="/",
            capture_output=True,
            text=True,
        )

    with jobs([1, 1]) as job, Ranks(job) as ranks:
        first = ranks.start(0, agent, host=0, seconds=600)
        pid = str(job.agent_of(0))

        def listed():
            found = map(json.loads, agents("--json").stdout.splitlines())
            return next((one for one in found if one.get("pid") == pid and "log" in one), None)

        one = until(listed, what="the agent of another version is listed")
        version = other_version.RELEASE if newer == "agent" else commkit.__version__
        assert one["version"] == version
        stopped = agents("stop", one["name"])
        assert (stopped.returncode, stopped.stdout) == (0, f"stopped {one['name']}\n")
        _, said = told(first)
        assert "stopped by hand" in said
        assert not listed()


def test_the_native_version_is_the_package_s():
    assert _C.release() == commkit.__version__
    agent = subprocess.check_output([ROOT / "commkit" / "commkit-agent", "--version"], text=True)
    assert agent == f"commkit-agent {commkit.__version__}, protocol {_C.protocol_version()}\n"


def test_a_hello_of_another_version_that_is_no_hello_is_a_stranger(jobs):
    """What does not begin like a hello of commkit is not answered, whatever its header says."""
    with jobs([1, 1]) as job, Ranks(job) as ranks:
        ranks.start(0, ROOT, host=0)
        port = listening(job)
        for payload in (b"", b"\0" * 64, hello(b"x" * 32, magic=1), text(b"x")):
            with socket.create_connection(("127.0.0.1", port), 10) as it:
                it.sendall(frame(64, payload, version=999))
                it.settimeout(10)
                with contextlib.suppress(ConnectionResetError):
                    assert it.recv(100) == b""
        assert job.log_text().count("does not speak commkit's protocol, version 1") == 4
