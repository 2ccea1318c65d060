"""What torch builds on process groups gives the same numbers on stock torch and through commkit."""

from __future__ import annotations

import framework_programs
import pytest

CASES = [
    "fsdp_tp",
    "ddp",
    "dtensor",
    "functional",
    "pipeline",
    "remote_calls",
    "saved_in_a_process",
]
#: Those that commkit's own functions are tried with as well.
NATIVE = ["fsdp_tp", "ddp"]
#: These create no group besides the default one.
DEFAULT_GROUP_ALONE = ["remote_calls", "saved_in_a_process"]

#: Seconds for one case's world, and for the program to import everything.
DEADLINE, START = 120, 60

pytestmark = pytest.mark.timeout(2 * (START + DEADLINE * (len(CASES) + 1)) + 60)


def cases(api, names, directory, *, commkit):
    return framework_programs.Cases(
        "torch_world.py", [api], names, directory, commkit=commkit, start=START, each=DEADLINE
    )


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return cases("torch", CASES, tmp_path_factory.mktemp("stock"), commkit=False)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    names = [*CASES, "inductor"]
    return cases("torch", names, tmp_path_factory.mktemp("commkit"), commkit=True)


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    return cases("commkit", NATIVE, tmp_path_factory.mktemp("native"), commkit=False)


def by_torch(ranks):
    """What ranks have found, after a look at who made their groups."""
    assert not any(one["by_commkit"] or made_by_commkit(one["names"]) for one in ranks)
    return [one["found"] for one in ranks]


def by_commkit(ranks, groups=True):
    assert all(one["by_commkit"] for one in ranks)
    assert not groups or all(made_by_commkit(one["names"]) for one in ranks)
    return [one["found"] for one in ranks]


def made_by_commkit(names):
    """Whether some group has a name that follows from its members."""
    return any(name.startswith("ck:") for name in names)


@pytest.mark.parametrize("case", CASES)
def test_an_unchanged_script_computes_what_it_computes_on_stock_torch(
    case, stock, unchanged, request
):
    ours = by_commkit(unchanged.ranks(case, request), groups=case not in DEFAULT_GROUP_ALONE)
    assert ours == by_torch(stock.ranks(case, request))


def test_compiled_code_computes_what_the_same_collectives_compute_on_stock_torch(
    stock, unchanged, request
):
    eager = by_torch(stock.ranks("functional", request))
    ours = by_commkit(unchanged.ranks("inductor", request))
    assert ours == [found["eager"] for found in eager]


@pytest.mark.parametrize("case", NATIVE)
def test_a_declared_layout_computes_what_torchs_own_groups_compute(case, stock, native, request):
    assert by_commkit(native.ranks(case, request)) == by_torch(stock.ranks(case, request))
