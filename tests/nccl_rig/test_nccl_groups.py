"""Groups over the rig, and what they cost: calls of NCCL, counted."""

from __future__ import annotations

import time

import pytest
import rig_ranks as ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from worlds import STARTS, begun


def _sum(group=None, value=None):
    tensor = torch.tensor([float(dist.get_rank() + 1 if value is None else value)]).cuda()
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def _halves():
    size = dist.get_world_size()
    return [list(range(size // 2)), list(range(size // 2, size))]


def _mine(lists):
    return next(ranks for ranks in lists if dist.get_rank() in ranks)


def _two_groups(start):
    with begun(start):
        before = ranks.calls()
        groups = [dist.new_group(members) for members in _halves()]
        created = ranks.calls()
        mine = groups[0 if dist.get_rank() in _halves()[0] else 1]
        total = _sum(mine)
        after = ranks.calls()
        return before, created, after, total == sum(rank + 1 for rank in _mine(_halves()))


def _increase(name, earlier, later):
    return later[name] - earlier[name]


@pytest.mark.parametrize("start", ["stock", "commkit"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_lazy_group_is_made_by_its_members_at_first_use(size, start):
    for result in ranks.run_ranks(size, _two_groups, start):
        before, created, after, right = result.value
        assert right
        assert before["created"] == created["created"] == 0
        assert after["created"] == 1
        assert after["split"] == 0


@pytest.mark.parametrize("start", ["stock bound", "commkit bound"])
@pytest.mark.parametrize("size", [4, 8])
def test_a_bound_device_makes_every_rank_split_for_every_group(size, start):
    results = ranks.run_ranks(size, _two_groups, start)
    for result in results:
        before, created, after, right = result.value
        assert right
        assert before["created"] == 1
        assert _increase("split", before, created) == 2
        assert _increase("split_no_color", before, created) == 1
        assert after["created"] == 2
        assert after["get_unique_id"] <= 1


@pytest.mark.parametrize("start", ["stock bound", "commkit bound"])
def test_torch_polls_communicators_that_do_not_block(start):
    env = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1", "NCCL_RIG_INIT_MS": "100"}
    for result in ranks.run_ranks(4, _two_groups, start, env=env):
        before, created, after, right = result.value
        assert right
        assert _increase("split", before, created) <= 2
        assert after["created"] == 2
        assert after["failed"] == 0


def _split_group():
    with begun("stock bound"):
        before = ranks.calls()
        group = dist.split_group(split_ranks=_halves())
        after = ranks.calls()
        return _sum(group), _increase("split", before, after), after["split_no_color"]


def test_split_group_is_one_split_for_all_groups():
    totals = [result.value for result in ranks.run_ranks(8, _split_group)]
    assert totals == [(10.0, 1, 0)] * 4 + [(26.0, 1, 0)] * 4


def _mesh(start):
    with begun(start):
        size = dist.get_world_size()
        mesh = init_device_mesh("cuda", (2, size // 2), mesh_dim_names=("dp", "tp"))
        return _sum(mesh["dp"].get_group()), _sum(mesh["tp"].get_group())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("start", STARTS)
def test_a_mesh_of_two_dimensions_has_a_group_for_each(start):
    results = ranks.run_ranks(8, _mesh, start, timeout=110)
    for rank, result in enumerate(results):
        column, row = rank % 4, rank // 4
        assert result.value == (2.0 * column + 6, sum(4.0 * row + k + 1 for k in range(4)))


def _many_groups(size):
    with begun("stock"):
        rank = dist.get_rank()
        groups = {}
        for first in range(size):
            for second in range(first + 1, size):
                group = dist.new_group([first, second])
                if rank in (first, second):
                    groups[first, second] = group
        totals = {pair: _sum(group) for pair, group in groups.items()}
        for group in list(groups.values())[1:]:
            dist.destroy_process_group(group)
        return totals, ranks.calls()


def test_every_pair_of_ranks_can_be_a_group_and_groups_end_singly():
    for result in ranks.run_ranks(4, _many_groups, 4):
        totals, calls = result.value
        assert totals == {(one, two): one + two + 2.0 for one, two in totals}
        assert len(totals) == calls["created"] == 3
        assert calls["destroy"] + calls["abort"] == 2


def _later():
    with begun("commkit"):
        time.sleep(2.5)  # torch's monitor asks the store for its own keys every second
        return _sum(dist.new_group())


def test_the_store_outlives_the_questions_of_nccls_heartbeat_monitor():
    assert [result.value for result in ranks.run_ranks(2, _later)] == [3.0, 3.0]


def _again(times):
    for k in range(times):
        with begun("commkit"):
            assert _sum(value=k) == k * dist.get_world_size()
    return ranks.calls()


def test_a_world_can_start_and_end_again():
    for result in ranks.run_ranks(2, _again, 3):
        assert result.calls["created"] == 3
        assert result.calls["destroy"] + result.calls["abort"] == 3
