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


def cases(directory, *, commkit):
    program = "hugging_face_world.py"
    return framework_programs.Cases(
        program, [], CASES, directory, commkit=commkit, start=START, each=DEADLINE
    )


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return cases(tmp_path_factory.mktemp("stock"), commkit=False)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    return cases(tmp_path_factory.mktemp("commkit"), commkit=True)


@pytest.mark.parametrize("case", CASES)
def test_an_unchanged_script_computes_what_it_computes_on_stock_torch(
    case, stock, unchanged, request
):
    ours, theirs = unchanged.ranks(case, request), stock.ranks(case, request)
    assert all(one["by_commkit"] and one["world"] == 2 for one in ours)
    assert not any(one["by_commkit"] for one in theirs)
    assert [one["found"] for one in ours] == [one["found"] for one in theirs]
    if case == "tensor_parallel":
        assert all(any(name[:3] == "ck:" for name in one["names"]) for one in ours)
