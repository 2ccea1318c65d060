"""torch's own tests of torch.distributed on gloo end through commkit as they end on stock torch.

What stock torch does is recorded once a version: tests/recorded/torch_suite.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import runs

from commkit import _C

RECORD: dict[str, Any] = (
    json.loads(runs.record_file().read_text()) if runs.record_file().exists() else {}
)
SIZES = [runs.WORLD, runs.LARGER_WORLD]

#: Tests that fail now and then on stock torch too, and why.  They get RACE_TRIES tries.
RACES = {
    "test_new_subgroups_with_group_param": "a rank may destroy its group while the other one is "
    "still connecting (on a machine with ten times as much to do as it has cores, stock torch "
    "failed 2 times of 25, torch through commkit once)",
}
RACE_TRIES = 4

pytestmark = [
    pytest.mark.skipif(
        not RECORD,
        reason=f"stock torch {runs.version()} is not recorded: run make torch-suite-record",
    ),
    # The first test waits for both runs.
    pytest.mark.timeout(2 * runs.DEADLINE + 60),
]


class Suite:
    """The recorded tests through commkit, all of them once, by world size."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.env = {"COMMKIT_LOG_DIR": str(directory)}
        self.runs = {size: self.run(size, list(RECORD[str(size)])) for size in SIZES}
        self.left = self._agents_after(5.0)

    def run(self, size: int, names: list[str]) -> runs.Run:
        return runs.run(size, names, self._directory, commkit=True, env=self.env)

    def _agents_after(self, patience: float) -> list[str]:
        """Agents of these worlds that are still there: they leave when their ranks have."""
        until = time.monotonic() + patience
        while True:
            logs = [agent.get("log", "") for agent in _C.agents()]
            left = [log for log in logs if log.startswith(str(self._directory))]
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.05)


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite(tmp_path_factory.mktemp("torch-suite"))


def _recorded(size, outcome):
    tests = RECORD.get(str(size), {}).items()
    return [name for name, entry in tests if entry["outcome"] == outcome]


def _stock(size, name):
    return {key: value for key, value in RECORD[str(size)][name].items() if key != "reason"}


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in SIZES for name in _recorded(size, "passed")]
)
def test_what_passes_on_stock_torch_passes_through_commkit(suite, request, size, name):
    run = suite.runs[size]
    if getattr(request.node, "execution_count", 1) > 1:
        run = suite.run(size, [name])  # CI tries what fails once more: this test alone
    for _ in range(RACE_TRIES - 1 if name in RACES else 0):
        if run.summary(name)["outcome"] == "failed":
            run = suite.run(size, [name])
    trace = run.tests.get(name, {}).get("reason") or run.log[-3000:]
    assert run.summary(name) == _stock(size, name), trace


@pytest.mark.parametrize("size", SIZES)
def test_what_stock_torch_skips_is_skipped_at_the_same_place(suite, size):
    # The ranks' exit codes tell why; most skip inside the test, when their group exists.
    run, skipped = suite.runs[size], _recorded(size, "skipped")
    assert len(skipped) > 1
    different = {
        name: run.tests.get(name) for name in skipped if run.summary(name) != _stock(size, name)
    }
    assert not different, run.log[-3000:]


@pytest.mark.parametrize("size", SIZES)
def test_every_default_group_of_every_rank_is_commkit_s(suite, size):
    groups = suite.runs[size].groups
    stock = sum(entry["groups"] for entry in RECORD[str(size)].values())
    assert stock >= size * 20
    by_torch = [group for group in groups if not group["commkit"]]
    assert (len(groups), by_torch) == (stock, [])
    assert {(group["size"], group["store"]) for group in groups} == {(size, "TCPStore")}


@pytest.mark.parametrize("size", SIZES)
def test_every_other_group_of_every_rank_has_a_name_that_is_its_members_alone(suite, size):
    subgroups = suite.runs[size].subgroups
    assert len(subgroups) > size * 3
    assert [group for group in subgroups if not group["name"].startswith("ck:")] == []


def test_the_agents_of_all_these_worlds_have_left(suite):
    assert suite.left == []


def test_a_group_that_torch_makes_alone_is_told_from_commkit_s(suite, tmp_path):
    name = "test_all_reduce_coalesced_group_max"
    env = {**suite.env, "COMMKIT_DISABLE": "1"}
    run = runs.run(runs.LARGER_WORLD, [name], tmp_path, commkit=True, env=env)
    assert run.summary(name) == _stock(runs.LARGER_WORLD, name), run.log[-3000:]
    assert [group["commkit"] for group in run.groups] == [False] * runs.LARGER_WORLD
    assert run.subgroups and not any("ck:" in group["name"] for group in run.subgroups)
