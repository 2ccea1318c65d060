"""Deadlines and interrupts act on a rank that sits in native code."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import ctypes, signal, sys
from commkit.bench import watch as module
from commkit.bench.watch import Watch

def stick():
    # A mutex locked twice: no signal handler of Python runs, and nothing returns early.
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    print("stuck", flush=True)
    libc.pthread_mutex_lock(mutex)

"""


@pytest.fixture
def start(repository):
    def run(body):
        return subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
            cwd=repository,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def test_a_deadline_ends_a_stuck_rank_and_names_its_phase(start):
    process = start("""
        with Watch("rank 3 of 8") as watch:
            watch.phase("size 1048576: timing in place")
            watch.allow(0.3)
            stick()
    """)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 124
    assert err.startswith(
        "commkit: rank 3 of 8: size 1048576: timing in place: no end within 0.3 s"
    )
    assert err.count("\n") == 1


def test_a_deadline_that_moves_on_does_not_fire(start):
    process = start("""
        import time
        with Watch("rank 0 of 1") as watch:
            for step in range(5):
                watch.allow(0.4)
                time.sleep(0.15)
            watch.allow(60)
        print("through")
    """)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "through\n", "")


def test_after_the_watch_nothing_fires(start):
    process = start("""
        import time
        with Watch("rank 0 of 1") as watch:
            watch.allow(0.2)
        time.sleep(0.5)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    """)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0


def test_an_interrupt_of_a_stuck_rank_ends_it_after_a_grace(start):
    process = start("""
        module.GRACE = 0.3
        with Watch("rank 0 of 2") as watch:
            watch.deferring = True
            watch.phase("size 8: timing in place")
            stick()
    """)
    assert process.stdout.readline() == "stuck\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.startswith("commkit: rank 0 of 2: size 8: timing in place: interrupted")


def test_a_second_interrupt_does_not_wait(start):
    process = start("""
        module.GRACE = 1000
        with Watch("rank 0 of 2") as watch:
            watch.deferring = True
            import threading
            def tell():
                while not watch._count:
                    pass
                print("heard", flush=True)
            threading.Thread(target=tell, daemon=True).start()
            stick()
    """)
    assert process.stdout.readline() == "stuck\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "heard\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted twice" in err


def test_an_interrupt_is_a_flag_while_deferring_and_an_exception_otherwise(start):
    process = start("""
        with Watch("rank 0 of 1") as watch:
            watch.deferring = True
            signal.raise_signal(signal.SIGINT)
            print(watch.interrupted)
            watch.deferring = False
        with Watch("rank 0 of 1") as watch:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                print("raised")
    """)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "True\nraised\n", "")


@pytest.mark.parametrize(("spent", "late"), [(0.0, False), (0.95, True)])
def test_most_of_the_time_being_gone_is_late(monkeypatch, spent, late):
    from commkit.bench import watch as module

    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    watch = module.Watch("rank 0 of 1")
    assert not watch.late()
    watch.allow(10)
    clock[0] += 10 * spent
    assert watch.late() is late
