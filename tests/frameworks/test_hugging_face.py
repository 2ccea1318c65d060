"""accelerate and transformers train through commkit, on CPUs, to the numbers of stock torch."""

from __future__ import annotations

import importlib.util

import framework_programs
import pytest

CASES = ["accelerated", "trained", "tensor_parallel"]

#: Seconds for one case's world, and for the program to import everything.
DEADLINE, START = 150, 120

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")),
        reason="needs transformers and accelerate: make frameworks",
    ),
    pytest.mark.timeout(2 * (START + DEADLINE * len(CASES)) + 60),
]


def run(names, directory, *, commkit):
    return framework_programs.run(
        "hugging_face_world.py",
        DEADLINE,
        *names,
        commkit=commkit,
        log_dir=directory,
        deadline=START + DEADLINE * len(names),
    )


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    found = run(CASES, tmp_path_factory.mktemp("stock"), commkit=False)
    assert not any(one["by_commkit"] for ranks in found.values() for one in ranks)
    return found


@pytest.fixture(scope="module")
def through_commkit(tmp_path_factory):
    return run(CASES, tmp_path_factory.mktemp("commkit"), commkit=True)


@pytest.mark.parametrize("case", CASES)
def test_an_unchanged_script_computes_what_it_computes_on_stock_torch(case, stock, through_commkit):
    ranks = through_commkit[case]
    assert all(one["by_commkit"] and one["world"] == 2 for one in ranks)
    assert [one["found"] for one in ranks] == [one["found"] for one in stock[case]]
    if case == "tensor_parallel":
        assert all(any(name[:3] == "ck:" for name in one["names"]) for one in ranks)
