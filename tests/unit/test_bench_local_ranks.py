"""Ranks by fork: what they see, how they end, and that none stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

PRELUDE = """
import os, signal, sys, time
from commkit.bench import launch_local
from commkit.errors import LaunchError, UsageError
launch_local.GRACE = 0.5

def say(*words):
    # One write a line: print may make two, and lines of ranks would mix.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def body(member):
{body}

sys.exit(launch_local.run({nproc}, body))
"""


@pytest.fixture
def start(repository):
    def run(body, nproc=3):
        script = PRELUDE.format(body=textwrap.indent(textwrap.dedent(body), "    "), nproc=nproc)
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script],
            cwd=repository,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def finish(process):
    out, err = process.communicate(timeout=40)
    return process.returncode, out, err


def gone(pid):
    """Dead; a process that nobody has waited for yet counts."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_each_rank_sees_its_place_and_the_meeting_file_goes(start):
    process = start("""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        words = [os.environ[name] for name in names]
        assert os.stat(member.init_method[len("file://"):-len("/rendezvous")]).st_mode & 0o077 == 0
        say(member.rank, member.world_size, *words, member.init_method)
        return 0
    """)
    code, out, err = finish(process)
    assert (code, err) == (0, "")
    lines = sorted(line.split() for line in out.splitlines())
    assert [line[:-1] for line in lines] == [
        [str(r), "3", str(r), "3", str(r), "3"] for r in range(3)
    ]
    (method,) = {line[-1] for line in lines}
    assert not os.path.exists(os.path.dirname(method.removeprefix("file://")))


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((0, 0, 0), 0),
        ((4, 4, 4), 4),
        ((1, 4, 0), 4),
        ((1, 124, 1), 124),
        ((130, 130, 124), 130),
        ((0, 3, 0), 3),
    ],
)
def test_the_most_telling_exit_code_is_the_jobs(start, codes, expected):
    assert finish(start(f"return {codes}[member.rank]"))[0] == expected


def test_an_error_is_one_line_with_its_exit_code(start):
    code, _, err = finish(
        start("""
            if member.rank == 1:
                raise LaunchError("MASTER_ADDR=x: no such\\nhost")
            return 0
        """)
    )
    assert (code, err) == (3, "commkit: MASTER_ADDR=x: no such host\n")


def test_what_nobody_foresaw_keeps_its_traceback(start):
    code, _, err = finish(start("return 1 // member.rank if member.rank == 0 else 0"))
    assert code == 1
    assert "ZeroDivisionError" in err


def test_a_rank_that_a_signal_ended_is_named(start):
    code, _, err = finish(
        start("""
            if member.rank == 2:
                os.kill(os.getpid(), signal.SIGSEGV)
            return 0
        """)
    )
    assert code == 1
    assert "commkit: rank 2 was ended by SIGSEGV\n" in err


def test_survivors_of_a_failed_rank_are_killed(start):
    process = start("""
        if member.rank == 1:
            return 3
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(os.getpid())
        while True:
            time.sleep(1)
    """)
    code, out, err = finish(process)
    assert code == 3
    assert "killing rank 0, 2: still alive after the others" in err
    assert len(out.split()) == 2
    assert all(gone(int(pid)) for pid in out.split())


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_reach_every_rank_once(start, number, expected):
    process = start("""
        try:
            say(os.getpid())
            while True:
                time.sleep(1)
        except KeyboardInterrupt:
            say("interrupted")
            raise
    """)
    pids = [int(process.stdout.readline()) for _ in range(3)]
    process.send_signal(number)
    code, out, _ = finish(process)
    assert code == expected
    assert out.count("interrupted") == (3 if number == signal.SIGINT else 0)
    assert all(map(gone, pids))


def test_ranks_do_not_outlive_a_killed_parent(start):
    process = start("""
        say(os.getpid())
        while True:
            time.sleep(1)
    """)
    pids = [int(process.stdout.readline()) for _ in range(3)]
    process.kill()
    process.communicate(timeout=20)
    deadline = time.monotonic() + 20
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(map(gone, pids))
