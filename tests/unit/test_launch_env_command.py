"""`commkit env`, run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from commkit.settings import VARIABLES


@pytest.fixture
def env_command(repository):
    def run(*arguments, **variables):
        return subprocess.run(
            [sys.executable, "-m", "commkit", "env", *arguments],
            cwd=repository,
            env={**os.environ, "PYTHONPATH": str(repository), **variables},
            capture_output=True,
            text=True,
            timeout=50,
        )

    return run


TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}


def test_each_value_stands_beside_the_variable_it_came_from(env_command):
    done = env_command(**TORCH, LOCAL_RANK="1", SLURM_NTASKS="8", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in done.stdout.splitlines()
        if line.startswith("│")
    ]
    table = {row[0]: row[1:] for row in rows}
    assert table["launcher"][0] == "torchrun"
    assert table["world size"] == ["4", "WORLD_SIZE=4"]
    assert table["local world size"] == ["?", "not said: the agents find it out"]
    assert table["root"] == ["[::1]:29500, on rank 0's host", "MASTER_ADDR=::1 MASTER_PORT=29500"]
    assert table["gpus"] == ["none", "CUDA_VISIBLE_DEVICES"]
    assert "ignored: SLURM_NTASKS=8" in done.stdout
    assert "doubt: the job has no name of its own" in done.stdout


def test_json_holds_the_same(env_command):
    done = env_command("--json", **TORCH, COMMKIT_HOST_ID="h[1]")
    report = json.loads(done.stdout)
    assert report["fields"]["rank"] == [1, "RANK=1"]
    assert report["fields"]["host"][1] == "COMMKIT_HOST_ID=h[1]"
    assert report["ignored"] == []
    assert len(report["doubts"]) == 1


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**TORCH, "RANK": "x"}, "RANK='x': expected a whole number"),
        ({"PMIX_RANK": "1"}, "WORLD_SIZE is not set"),
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, "CUDA_VISIBLE_DEVICES='0,0'"),
        ({"COMMKIT_LAUNCHER": "pbs"}, "COMMKIT_LAUNCHER='pbs': expected torchrun, slurm"),
    ],
)
def test_a_wrong_environment_is_one_line_and_exit_code_3(env_command, variables, words):
    done = env_command(**variables)
    assert done.returncode == 3
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr


def test_settings_lists_every_variable(env_command):
    table, as_json = env_command("--settings"), env_command("--settings", "--json")
    assert all(name in table.stdout for name in VARIABLES)
    assert json.loads(as_json.stdout)["COMMKIT_PORT"]["accepts"] == "1-65535"


def test_settings_are_listed_even_if_one_of_them_is_wrong(env_command):
    assert env_command("--settings", COMMKIT_PORT="x").returncode == 0
