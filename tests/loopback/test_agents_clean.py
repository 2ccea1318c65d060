"""`commkit agents clean` ends agents that serve nobody, removes old logs, and spares what lives."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner
from overlay_jobs import until

from commkit import _C, cleanup, cli
from commkit.settings import load

pytestmark = pytest.mark.timeout(90)

DAY = 86400


@pytest.fixture(autouse=True)
def _no_long_second_look(monkeypatch):
    monkeypatch.setattr(cleanup, "SETTLE_SECONDS", 0.5)


def clean(*arguments):
    """Always with names: other agents of this user on this machine may be anybody's."""
    return CliRunner().invoke(cli.main, ["agents", "clean", *arguments], prog_name="commkit")


def name_of(pid):
    """The agent's socket, by the kernel's word: it need not answer."""
    inodes = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    with open("/proc/net/unix") as table:
        for line in table:
            fields = line.split()
            if len(fields) == 8 and f"socket:[{fields[6]}]" in inodes and fields[3] == "00010000":
                return fields[7][1:]
    raise AssertionError(f"agent {pid} has no socket")


def in_world(me):
    world = me.join()
    me.meet(world.identity.agent_pid)
    world.leave(5)
    return world.failures()


def after_a_while(me):
    """The agent watches its ranks only from 0.2 s on, off the join's critical path."""
    world = me.join()
    pid = world.identity.agent_pid
    until(lambda: os.getpid() in cleanup._watched(pid), what="the agent watches this rank")
    me.meet(pid)
    world.leave(5)
    return world.failures()


@contextlib.contextmanager
def suspended(pid):
    os.kill(pid, signal.SIGSTOP)
    until(lambda: cleanup._process(pid).state == "T")
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def agent_without_ranks(job):
    """An agent whose ranks have left and that is kept by connections that say nothing yet."""
    job.start(0, in_world)
    [pid] = job.expect(0)
    name = name_of(pid)
    over = threading.Event()

    def come() -> None:
        while not over.wait(0.2):
            with contextlib.suppress(OSError):
                silent = held.enter_context(socket.socket(socket.AF_UNIX))
                silent.connect(f"\0{name}")

    with contextlib.ExitStack() as held:
        coming = threading.Thread(target=come)
        coming.start()
        try:
            time.sleep(0.5)
            job.tell(0)
            job.values(0)
            until(lambda: not _agent(name).get("living"), what="the rank has left")
            yield name, pid
        finally:
            over.set()
            coming.join()


def _agent(name):
    return next((agent for agent in cleanup.agents() if agent["name"] == name), {})


def test_an_agent_of_a_living_job_is_left_and_the_job_hears_nothing(jobs):
    with jobs([2]) as job:
        job.start_all(in_world)
        pid, _ = job.expect(0, 1)
        name = name_of(pid)
        left = clean("--all", name)
        assert left.exit_code == 0
        assert left.stdout == f"left {name} (pid {pid}: ranks 0-1 of 2 are alive)\n"
        job.tell(0, 1)
        assert job.values() == [[], []]


def test_force_stops_the_agent_of_a_living_job_and_its_ranks_are_told(jobs):
    with jobs([1]) as job:
        job.start(0, in_world)
        [pid] = job.expect(0)
        name = name_of(pid)
        assert clean("--force", "--dry-run", name).stdout.startswith(
            f"would stop {name} (pid {pid}"
        )
        assert _agent(name)["pid"] == str(pid)
        forced = clean("--force", name)
        assert forced.exit_code == 0
        assert forced.stdout == f"stopped {name} (pid {pid}: ranks 0 of 1 are alive)\n"
        assert not _agent(name)
        job.tell(0)
        assert "stopped by hand" in " ".join(job.values()[0])


def test_an_agent_below_which_others_work_is_left_though_its_own_ranks_are_gone(jobs):
    with jobs([1, 1], env={"COMMKIT_TREE_DEGREE": "1"}) as job:
        job.start_all(in_world)
        root, _ = job.expect(0, 1)
        name = name_of(root)
        job.tell(0)
        job.values(0)
        until(lambda: not _agent(name).get("living"), what="rank 0 has left")
        assert clean("--all", name).stdout == (
            f"left {name} (pid {root}: serves 1 agents below it)\n"
        )
        job.tell(1)
        assert job.values(1) == [[]]


def test_an_agent_without_ranks_is_left_while_young_and_stopped_when_older(jobs):
    with jobs([1]) as job, agent_without_ranks(job) as (name, pid):
        young = clean(name)
        assert young.exit_code == 0 and f"left {name} (pid {pid}: only " in young.stdout
        would = clean("--all", "--dry-run", name)
        assert f"would stop {name} (pid {pid}: no ranks, no agents below it, " in would.stdout
        assert _agent(name)["pid"] == str(pid)
        done = clean("--older-than", "0s", name)
        assert done.exit_code == 0
        assert f"stopped {name} (pid {pid}: no ranks, no agents below it, " in done.stdout
        assert not _agent(name)


def test_a_suspended_agent_is_left_while_its_ranks_live_and_killed_when_they_are_gone(jobs):
    with jobs([1]) as job:
        job.start(0, after_a_while)
        [pid] = job.expect(0)
        name, rank = name_of(pid), job.ranks[0].pid
        with suspended(pid):
            assert _agent(name) | {"seconds": ""} == {
                "name": name,
                "pid": str(pid),
                "seconds": "",
                "state": "suspended",
            }
            left = clean("--all", name)
            assert left.stdout == (
                f"left {name} (pid {pid}: suspended, but its ranks live: pid {rank})\n"
            )
            stop = CliRunner().invoke(cli.main, ["agents", "stop", name], prog_name="commkit")
            assert stop.exit_code == 3 and f"pid {pid}) suspended" in stop.stderr
            assert "commkit agents clean" in stop.stderr
            job.kill(0)
            job.outcomes()
            killed = clean("--all", name)
            assert (killed.exit_code, killed.stdout) == (
                0,
                f"killed {name} (pid {pid}: suspended)\n",
            )
            assert pid not in job.agents()


def test_a_suspended_agent_with_living_ranks_is_killed_by_force(jobs):
    with jobs([1]) as job:
        job.start(0, after_a_while)
        [pid] = job.expect(0)
        name = name_of(pid)
        with suspended(pid):
            forced = clean("--force", name)
        assert forced.stdout == f"killed {name} (pid {pid}: suspended)\n"
        job.tell(0)
        assert "the agent has ended" in " ".join(job.values()[0])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_name_that_another_user_has_bound_is_neither_asked_nor_killed():
    name = f"commkit-{os.getuid()}-{'ab' * 8}"
    program = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        f"s.bind('\\0{name}'); s.listen(); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as squatter:
        squatter.stdout.readline()
        result = clean("--all", "--force", "--timeout", "1", name)
        assert result.exit_code == 124
        assert f"{name} (no pid)" in result.stderr and squatter.poll() is None
        assert clean("--all", name).stdout == (
            f"left {name} (no pid: its process belongs to another user or another pid namespace)\n"
        )
        squatter.stdin.close()


ZOMBIE = """
import ctypes, os, sys
child = os.fork()
if child == 0:
    ctypes.CDLL(None).prctl(15, b"commkit-agent")
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
os.waitpid(child, 0)
"""


def test_a_zombie_is_told_with_the_parent_that_does_not_reap_it():
    with subprocess.Popen(
        [sys.executable, "-c", ZOMBIE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        child = int(parent.stdout.readline())
        until(lambda: cleanup._process(child).state == "Z")
        lines = list(cleanup.clean_agents(age=10**9, dry_run=True))
        [line] = [line for line in lines if f"zombie pid {child}" in line]
        assert f"its parent, pid {parent.pid}," in line and "init" in line
        parent.stdin.close()


def make_old(path, days):
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def test_old_logs_go_and_those_of_living_agents_and_strange_files_stay(jobs, monkeypatch):
    with jobs([1]) as job:
        monkeypatch.setenv("COMMKIT_LOG_DIR", str(job.directory))
        job.start(0, in_world)
        job.expect(0)
        [alive] = job.directory.glob("agent-*.log")
        old = job.directory / f"agent-{'0' * 16}-1.log"
        new = job.directory / f"agent-{'1' * 16}-1.log"
        mine = job.directory / "agent-notes.log"
        for path, days in ((old, 8), (new, 6), (mine, 99)):
            path.write_text("text")
            make_old(path, days)
        # A job that says nothing for weeks is alive all the same.
        make_old(alive, 30)
        would = [*cleanup.clean_files(load(), dry_run=True)]
        assert f"would remove {old} (8 d old)" in would and old.exists()
        assert f"removed {old} (8 d old)" in [*cleanup.clean_files(load())]
        assert not old.exists()
        assert f"removed {new} (6 d old)" in [*cleanup.clean_files(load(), age=5 * DAY)]
        assert alive.exists() and mine.exists()
        job.tell(0)
        job.values()
        job.wait_for_agents_to_leave()
        make_old(alive, 30)
        assert f"removed {alive} (30 d old)" in [*cleanup.clean_files(load())]


def test_an_agent_that_starts_leaves_the_log_of_a_living_one_however_old(jobs):
    with jobs([1, 1]) as job:
        job.start(0, in_world)
        until(lambda: "listening on port" in job.log_text())
        [first] = job.directory.glob("agent-*.log")
        make_old(first, 30)
        stale = job.directory / f"agent-{'0' * 16}-1.log"
        stale.write_text("text")
        make_old(stale, 8)
        job.start(1, in_world)
        job.expect(0, 1)
        assert first.exists() and not stale.exists()
        job.tell(0, 1)
        job.values()


def test_the_bench_s_directory_goes_when_the_bench_has_been_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("COMMKIT_LOG_DIR", str(tmp_path / "logs"))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale, used = (tmp_path / f"commkit-bench-{pid}-x1y2" for pid in (ended.pid, os.getpid()))
    for path in (stale, used):
        path.mkdir()
        (path / "rendezvous").write_text("")
    [line] = cleanup.clean_files(load(), age=0)
    assert line.startswith(f"removed {stale} (")
    assert used.exists() and not stale.exists()


def test_the_bench_makes_its_directory_under_a_name_that_clean_knows(tmp_path):
    body = (
        "import os; from commkit.bench import launch_local;"
        "launch_local.run(1, lambda member: print(member) or 0)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", body],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ).stdout
    directory = shown.partition(f"file://{tmp_path}/")[2].partition("/rendezvous")[0]
    assert cleanup._BENCH.fullmatch(directory), shown


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5s", 1.5), ("15m", 900), ("2h", 7200), ("7d", 7 * DAY)]
)
def test_ages(text, seconds):
    assert cleanup.seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--older-than", "soon", "--dry-run"), "--older-than 'soon': expected a number of sec"),
        (("--older-than", "-1", "--dry-run"), "--older-than '-1': expected"),
        (("--all", "--older-than", "1m", "--dry-run"), "leave out --older-than"),
        (("--dry-run", "no-such"), "'no-such' is no agent of this user"),
    ],
)
def test_wrong_arguments_are_one_line_with_exit_code_2(arguments, words):
    result = clean(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr and result.stderr.count("\n") == 1


def test_agents_of_the_native_module_and_of_cleanup_are_the_same(jobs):
    with jobs([1]) as job:
        job.start(0, in_world)
        [pid] = job.expect(0)
        name = name_of(pid)
        assert cleanup._holder(name).pid == pid
        native = next(agent for agent in _C.agents() if agent["name"] == name)
        assert _agent(name)["log"] == native["log"] and native["protocol"].isdigit()
        job.tell(0)
        job.values()
