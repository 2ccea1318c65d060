"""Ranks and agents without a descriptor left."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from overlay_jobs import until

from commkit import errors, overlay


def joins_with_files(me, timeout, files):
    spec = me.spec()
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    try:
        return overlay.join(spec, timeout).leave(5)
    except errors.CommkitError as error:
        return type(error).__name__, str(error)


def test_a_rank_without_descriptors_says_which_limit_it_is(jobs):
    with jobs([1]) as job:
        job.start(0, joins_with_files, 20, 3)
        [(kind, text)] = job.values()
    assert kind == "OverlayError" and "Too many open files" in text and "ulimit -n" in text


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_agent_without_a_descriptor_left_does_not_spin(jobs):
    """Connections of local ranks are not given up for others: some of these find no room."""
    with jobs([25]) as job:
        for rank in range(24):
            job.start(rank, joins_with_files, 2, 20)
        agent = job.agent_of(0)
        until(lambda: len(os.listdir(f"/proc/{agent}/fd")) == 20, what="the agent has none left")
        before = cpu_seconds(agent)
        time.sleep(1.0)
        assert cpu_seconds(agent) - before < 0.3
        for kind, text in job.values():
            assert kind == "JoinTimeout" and text
