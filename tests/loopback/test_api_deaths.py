"""A rank or an agent is killed while the others are inside torch's own init."""

from __future__ import annotations

import datetime
import os
import signal
import time

import pytest
import torch_jobs
from learning import KNOWN_SECONDS, SLACK_SECONDS

import commkit
from commkit import api, errors, trouble

#: api asks the agents for this long who has died, after torch has lost a connection.
ASK_SECONDS = trouble.REPORT_DELAY


def _init(holder, directory):
    """When this rank's init ended, and how; `holder` stays away from torch's own part of it."""
    rank = int(os.environ["RANK"])
    torch_init = api._torch_init

    def held(*arguments, **named):
        open(f"{directory}/in-{rank}", "w").close()
        if rank == holder:
            time.sleep(60)
        return torch_init(*arguments, **named)

    api._torch_init = held
    # Connecting at once makes every other rank wait for the holder's address in the store.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    try:
        commkit.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    except errors.CommkitError as error:
        return type(error).__name__, str(error), time.monotonic()
    return "", "", time.monotonic()


@pytest.mark.parametrize("victim", ["rank 2", "host-1", "host-0"])
def test_a_death_while_ranks_wait_in_torch_s_store(tmp_path, victim):
    with torch_jobs.Job(4, hosts=2, log_dir=tmp_path) as job:
        for rank in range(4):
            job.start(rank, _init, 2, tmp_path)
        patience = time.monotonic() + 40
        while len(list(tmp_path.glob("in-*"))) < 4 and time.monotonic() < patience:
            time.sleep(0.02)
        time.sleep(0.3)  # into the store's waits
        if victim == "rank 2":
            pid = job.processes[2].pid
        else:
            ranks = {"host-0": "0-1", "host-1": "2-3"}[victim]
            [pid] = [int(a["pid"]) for a in job.agents() if a["ranks"] == ranks]
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        job.processes[2].kill()  # the holder, which would sleep on
        outcomes = job.outcomes()
    outcomes.pop(2)
    for rank, outcome in outcomes.items():
        assert not outcome.error, outcome.trace
        kind, text, at = outcome.value
        assert kind in ("RankDied", "JoinError", "OverlayError"), (rank, kind, text)
        assert victim in text or "rank 2" in text or "agent" in text, (rank, text)
        assert "\n" not in text
        assert at - killed < KNOWN_SECONDS + ASK_SECONDS + SLACK_SECONDS, (rank, at - killed, text)
