"""torch's own functions under commkit.patch(): made by members only, with torch's semantics."""

from __future__ import annotations

import datetime
import logging
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch_jobs

import commkit
from commkit import patch, patch_groups
from commkit.api import world

SOON = datetime.timedelta(seconds=40)


@pytest.fixture(autouse=True)
def _undo():
    yield
    patch.uninstall()


def total(group, value=None):
    rank = dist.get_rank()
    tensor = torch.tensor([10.0**rank if value is None else value], dtype=torch.float64)
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


def _start():
    commkit.patch()
    dist.init_process_group("gloo", timeout=SOON)
    assert world() is not None
    return dist.get_rank()


def _new_groups_of_torch():
    rank = _start()
    pairs = [[0, 1], [2, 3]] if rank % 2 == 0 else [[2, 3], [0, 1]]
    sums, names = [], []
    for ranks in pairs:
        group = dist.new_group(ranks, timeout=SOON, group_desc="pair")
        if rank in ranks:
            sums.append(total(group))
            names.append(group.group_name)
            assert group.group_desc == "pair"
        else:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
    # As many as they like: equal ranks, several times, with unequal histories.
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    for _ in range(2):
        sums.append(total(dist.new_group([3, 2, 1, 0], use_local_synchronization=True), 1))
    assert dist.new_group([rank ^ 1, rank ^ 2], use_local_synchronization=True) is None
    current, every = dist.new_subgroups(2)
    sums.append(total(current))
    assert len(every) == 2
    current, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    sums.append(total(current))
    dist.destroy_process_group(current)
    dist.destroy_process_group()
    return sums, names


@pytest.mark.parametrize("hosts", [1, 2])
def test_torch_s_own_calls_give_right_groups_whatever_the_order(tmp_path, hosts):
    results = torch_jobs.run(_new_groups_of_torch, 4, hosts=hosts, log_dir=tmp_path)
    assert [sums for sums, _ in results] == [
        [11, 4, 4, 11, 1001],
        [11, 4, 4, 11, 110],
        [1100, 4, 4, 1100, 110],
        [1100, 4, 4, 1100, 1001],
    ]
    names = [name for _, name in results]
    assert names[0] == names[1] != names[2] == names[3]


def _kept_order_and_errors():
    rank = _start()
    group = dist.new_group([2, 0, 1], sort_ranks=False) if "sort_ranks" in _new_group() else None
    order = dist.get_process_group_ranks(group) if group is not None else [2, 0, 1]
    texts = []
    duplicates = [[0, 0]] if "sort_ranks" in _new_group() else []  # older torch takes them
    for wrong in (*duplicates, [0, 9], [-1, 0]):
        with pytest.raises(ValueError) as caught:
            dist.new_group(wrong)
        texts.append(str(caught.value))
    with pytest.raises(ValueError, match="cannot be empty"):
        dist.new_subgroups_by_enumeration([])
    with pytest.raises(RuntimeError, match="safe to split|No backend"):
        dist.split_group(split_ranks=[[0, 1, 2]])
    everyone = dist.new_group()
    dist.destroy_process_group()
    return rank, order, texts, everyone is not None


def _new_group():
    import inspect

    return inspect.signature(dist.new_group).parameters


def test_checks_and_errors_stay_torch_s(tmp_path):
    for _, order, texts, everyone in torch_jobs.run(_kept_order_and_errors, 3, log_dir=tmp_path):
        assert order == [2, 0, 1] and everyone
        *duplicates, high, low = texts
        assert all("duplicate entries" in text for text in duplicates)
        assert "rank" in high.lower() and "rank" in low.lower()


def _meshes():
    _start()
    mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    sums = [total(mesh.get_group(name)) for name in ("pp", "dp", "tp")]
    flat = mesh["pp", "dp"]._flatten("both")
    sums.append(total(flat.get_group()))
    names = [mesh.get_group(name).group_name for name in ("pp", "dp", "tp")]
    dist.destroy_process_group()
    return sums, names


def test_a_device_mesh_of_torch_s_is_made_by_members_only(tmp_path):
    results = torch_jobs.run(_meshes, 8, log_dir=tmp_path)
    for rank, (sums, names) in enumerate(results):
        sets = [[r for r in range(8) if r & ~bits == rank & ~bits] for bits in (4, 2, 1, 6)]
        assert sums == [sum(10**r for r in ranks) for ranks in sets]
        assert all(name.startswith("ck:") for name in names)


def _with_barriers():
    rank = _start()
    for ranks in ([0, 1], [1, 2], [0, 2]):
        group = dist.new_group(ranks)
        if rank in ranks:
            assert total(group) == sum(10**r for r in ranks)
    local = [rank, 2] if rank < 1 else [0, 2]
    if rank != 1:
        total(dist.new_group(local, use_local_synchronization=True))
    total(dist.new_group([0, 2]))
    dist.destroy_process_group()
    return sum(key.startswith("torch/") for key in ())


def test_a_barrier_of_the_world_after_each_group_is_kept(tmp_path):
    torch_jobs.run(_with_barriers, 3, env={"TORCH_DIST_INIT_BARRIER": "1"}, log_dir=tmp_path)


def _opened_by_one():
    import os

    rank = _start()
    dist.new_group([rank], use_local_synchronization=True)
    before = len(os.listdir("/proc/self/fd"))
    groups = [dist.new_group([rank], use_local_synchronization=True) for _ in range(8)]
    grown = len(os.listdir("/proc/self/fd")) - before
    sums = {total(group, 1) for group in groups}
    dist.destroy_process_group()
    return grown, sums


def test_a_group_of_one_opens_nothing(tmp_path):
    assert torch_jobs.run(_opened_by_one, 2, log_dir=tmp_path) == [(0, {1})] * 2


def test_undo_puts_back_what_torch_had():
    names = list(patch_groups._WRAPPERS)
    before = {name: getattr(c10d, name) for name in names}
    mesh_split = dist.device_mesh.split_group
    patch.install()
    assert all(getattr(c10d, name) is not before[name] for name in names)
    assert dist.split_group is dist.device_mesh.split_group is not mesh_split
    patch.uninstall()
    assert {name: getattr(c10d, name) for name in names} == before
    assert dist.device_mesh.split_group is mesh_split
    # Without a world of commkit's nothing changes even while it is installed.
    patch.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.new_group([0]).group_name.startswith("ck:")
    dist.destroy_process_group()


def test_a_torch_that_creates_groups_in_another_way_is_left_alone(monkeypatch, caplog):
    def renamed(members, hashed):
        raise AssertionError

    monkeypatch.setattr(c10d, "_process_group_name", renamed)
    helper = c10d._new_process_group_helper
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "commkit"):
            patch.install()
        assert c10d._process_group_name is renamed
        assert c10d._new_process_group_helper is helper
        patch.uninstall()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "_process_group_name takes members, hashed" in said[0]
    assert "torch" in sys.modules
