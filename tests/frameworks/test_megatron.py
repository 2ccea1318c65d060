"""Unchanged Megatron-core has the groups and the sums of stock torch through commkit, too."""

from __future__ import annotations

import importlib.util
import json
import os

import framework_programs
import pytest

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("megatron", "einops")),
    reason="needs megatron-core and einops",
)

SEED = int.from_bytes(os.urandom(4), "big")


def layout(tp=1, cp=1, pp=1, ep=1, **rest):
    return {
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        **rest,
    }


#: world size -> layouts, one after the other in one world
LAYOUTS = {
    8: [
        layout(tp=2, cp=2, ep=2),
        layout(tp=2, pp=2, ep=2, expert_tensor_parallel_size=1),
        layout(tp=2, pp=2, order="tp-cp-pp-ep-dp"),
        layout(cp=4, hierarchical_context_parallel_sizes=[2, 2]),
        layout(pp=2, hybrid_context_parallel=True),
        # The sets of ranks of the first one again.
        layout(tp=2, cp=2, ep=2),
    ],
    32: [
        layout(tp=2, cp=2, pp=2, ep=4, expert_tensor_parallel_size=1),
        layout(tp=4, ep=2, num_distributed_optimizer_instances=2),
    ],
    64: [
        layout(tp=2, cp=2, pp=4, ep=4, expert_tensor_parallel_size=1),
        layout(tp=4, cp=2, ep=4, pp=2, expert_tensor_parallel_size=2),
    ],
    256: [
        layout(tp=8, cp=2, pp=4, ep=4, expert_tensor_parallel_size=2),
        layout(tp=4, cp=4, pp=2, ep=8, num_distributed_optimizer_instances=2),
    ],
}


def run(backend, world_size, directory, *, commkit, deadline):
    texts = [json.dumps(one) for one in LAYOUTS[world_size]]
    return framework_programs.run(
        "megatron_world.py",
        backend,
        world_size,
        SEED,
        deadline,
        *texts,
        commkit=commkit,
        log_dir=directory,
        deadline=deadline + 120,
    )


def compare(ranks, stock, *, sums=True):
    """Rank by rank and layout by layout; says which group is another."""
    for ours, theirs in zip(ranks, stock, strict=True):
        rank = ours["rank"]
        assert theirs["rank"] == rank
        for number, (one, other) in enumerate(zip(ours["layouts"], theirs["layouts"], strict=True)):
            where = f"rank {rank}, layout {number}, seed {SEED}"
            assert len(other["groups"]) > 15, where
            assert one["groups"] == other["groups"], where
            assert one["descriptions"] == other["descriptions"], where
            assert one["numbers"] == other["numbers"], where
            if sums:
                assert set(one["sums"]) == set(one["groups"]), where
                assert one["sums"] == other["sums"], where


def created_by_commkit(ranks):
    """Every world by commkit, and every group of one under a name that is its members' alone."""
    return all(
        one["by_commkit"] and one["names"] and all(name[:3] == "ck:" for name in one["names"])
        for one in ranks
    )


def is_stock(ranks):
    return not any(
        one["by_commkit"] or any(name[:3] == "ck:" for name in one["names"]) for one in ranks
    )


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world_size", [8, 32, pytest.param(64, marks=pytest.mark.slow)])
def test_late_ranks_get_the_groups_and_sums_of_stock_torch(world_size, tmp_path):
    print(f"seed {SEED}")
    deadline = 100 + 5 * world_size
    ranks = run("gloo", world_size, tmp_path, commkit=True, deadline=deadline)
    stock = run("gloo", world_size, tmp_path, commkit=False, deadline=deadline)
    assert created_by_commkit(ranks)
    assert is_stock(stock)
    compare(ranks, stock)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_256_real_ranks_whose_groups_do_not_connect_have_the_groups_of_stock_torch(tmp_path):
    ranks = run("cpu:fake", 256, tmp_path, commkit=True, deadline=600)
    stock = run("fake", 256, tmp_path, commkit=False, deadline=600)
    assert created_by_commkit(ranks)
    assert is_stock(stock)
    compare(ranks, stock, sums=False)


@pytest.mark.timeout(300)
def test_the_fake_back_end_is_left_to_torch(tmp_path):
    ranks = run("fake/31", 256, tmp_path, commkit=True, deadline=100)
    stock = run("fake/31", 256, tmp_path, commkit=False, deadline=100)
    assert len(ranks) == 9
    assert is_stock(ranks)
    assert is_stock(stock)
    compare(ranks, stock, sums=False)
