"""`commkit agents` lists, inspects and stops the agents of this user."""

from __future__ import annotations

import json
import time

import pytest
import torch_jobs
from click.testing import CliRunner

import commkit
from commkit import api, cli


def _agents(*arguments):
    return CliRunner().invoke(cli.main, ["agents", *arguments], prog_name="commkit")


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A world of one rank in this process, and the name of its agent."""
    monkeypatch.setenv("COMMKIT_LOG_DIR", str(tmp_path))
    commkit.init_process_group("gloo")
    with torch_jobs.Job(1, log_dir=tmp_path) as job:
        [agent] = job.agents()
    yield agent["name"]
    commkit.destroy_process_group()


def test_a_job_s_agent_is_listed_with_its_ranks(world):
    listed = _agents()
    assert listed.exit_code == 0
    [row] = [line.split() for line in listed.stdout.splitlines() if world in line]
    assert row[-3:] == ["0", "1", "1"] and "formed" in row
    [agent] = [
        agent
        for agent in map(json.loads, _agents("--json").stdout.splitlines())
        if agent["name"] == world
    ]
    assert agent["log"].startswith("/") and int(agent["pid"]) > 0


def test_inspect_shows_every_field(world):
    shown = _agents("inspect", world)
    assert shown.exit_code == 0
    fields = dict(line.split(None, 1) for line in shown.stdout.splitlines())
    assert fields["name"] == world and fields["epoch"] == str(api.world().identity.epoch)


def test_a_stopped_agent_is_a_failure_of_its_ranks_and_gone(world):
    stopped = _agents("stop", world)
    assert (stopped.exit_code, stopped.stdout) == (0, f"stopped {world}\n")
    patience = time.monotonic() + 10
    while not api.world().failures() and time.monotonic() < patience:
        time.sleep(0.02)
    assert "stopped by hand" in "; ".join(api.world().failures())
    assert world not in _agents().stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("stop",), "expected names of agents or --all"),
        (("stop", "--all", "x"), "expected names of agents or --all"),
        (("stop", "no-such"), "'no-such' is no agent of this user"),
        (("inspect", "no-such"), "'no-such' is no agent of this user"),
        (("--json", "stop", "--all"), "--json is for the list"),
    ],
)
def test_wrong_arguments_are_one_line_with_exit_code_2(arguments, words):
    result = _agents(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr and result.stderr.count("\n") == 1
