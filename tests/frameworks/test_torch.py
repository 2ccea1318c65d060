"""What torch builds on process groups gives the same numbers on stock torch and through commkit."""

from __future__ import annotations

import framework_programs
import pytest

#: Seconds for one case's world; the time until the program has imported torch comes on top.
DEADLINE = 120

CASES = [
    "fsdp_tp",
    "ddp",
    "dtensor",
    "functional",
    "inductor",
    "pipeline",
    "remote_calls",
    "saved_in_a_process",
]
#: Those that commkit's own functions are tried with as well.
NATIVE = ["fsdp_tp", "ddp"]


def run(api, names, directory, *, commkit):
    return framework_programs.run(
        "torch_world.py",
        api,
        DEADLINE,
        *names,
        commkit=commkit,
        log_dir=directory,
        deadline=60 + DEADLINE * len(names),
    )


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """What every case gives on stock torch."""
    found = run("torch", CASES, tmp_path_factory.mktemp("stock"), commkit=False)
    assert not any(one["by_commkit"] for ranks in found.values() for one in ranks)
    return found


def made_by_commkit(ranks):
    """Whether commkit started the world of these and named what they created."""
    names = [name for one in ranks for name in one["names"]]
    return all(one["by_commkit"] for one in ranks) and any(name[:3] == "ck:" for name in names)


def numbers(ranks):
    return [one["found"] for one in ranks]


@pytest.mark.timeout(60 + 2 * (60 + DEADLINE * len(CASES)))
@pytest.mark.parametrize("case", CASES)
def test_an_unchanged_script_computes_what_it_computes_on_stock_torch(case, stock, tmp_path):
    ranks = run("torch", [case], tmp_path, commkit=True)[case]
    if case in ("remote_calls", "saved_in_a_process"):
        assert all(one["by_commkit"] for one in ranks)  # they create no group but the default one
    else:
        assert made_by_commkit(ranks)
    assert numbers(ranks) == numbers(stock[case])


@pytest.mark.timeout(60 + 2 * (60 + DEADLINE * len(CASES)))
@pytest.mark.parametrize("case", NATIVE)
def test_a_declared_layout_computes_what_torchs_own_groups_compute(case, stock, tmp_path):
    ranks = run("commkit", [case], tmp_path, commkit=False)[case]
    assert made_by_commkit(ranks)
    assert numbers(ranks) == numbers(stock[case])
