"""Groups of a layout, made by their members: what they compute, and what they are called."""

from __future__ import annotations

import datetime
import os
import random
import time

import numpy
import pytest
import torch
import torch.distributed as dist
import torch_jobs

import commkit
from commkit import groups

SOON = datetime.timedelta(seconds=40)


def total(group, value=None):
    """The sum over a group of 10**rank, which says who was in it."""
    rank = dist.get_rank()
    tensor = torch.tensor([10.0**rank if value is None else value], dtype=torch.float64)
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


def _layout(layout, families):
    commkit.init_process_group("gloo", timeout=SOON, layout=layout)
    sums = {name: total(commkit.get_group(name)) for name in families}
    ranks = {name: dist.get_process_group_ranks(commkit.get_group(name)) for name in families}
    commkit.destroy_process_group()
    return sums, ranks


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_the_groups_of_a_layout_reduce_over_their_own_ranks(tmp_path, hosts):
    families = ("tp", "cp", "dp")
    results = torch_jobs.run(_layout, 8, "tp=2,cp=2,dp=2", families, hosts=hosts, log_dir=tmp_path)
    for rank, (sums, ranks) in enumerate(results):
        assert ranks == {
            "tp": [rank & ~1, rank | 1],
            "cp": [rank & ~2, rank | 2],
            "dp": [rank & ~4, rank | 4],
        }
        assert sums == {name: sum(10**r for r in ranks[name]) for name in families}


def _in_another_order():
    commkit.init_process_group("gloo", timeout=SOON)
    rank = dist.get_rank()
    mine = [[0, 1], [0, 2]] if rank == 0 else [[2, 3], [0, 2]] if rank == 2 else None
    mine = mine or ([[0, 1], [1, 3]] if rank == 1 else [[2, 3], [1, 3]])
    # As torch has it: everybody calls for every group.  Members first, in orders of their own.
    order = mine + [ranks for ranks in ([0, 1], [2, 3], [0, 2], [1, 3]) if ranks not in mine]
    sums = {}
    for ranks in order:
        group = commkit.new_group(ranks)
        if rank in ranks:
            sums[str(ranks)] = total(group)
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
    commkit.destroy_process_group()
    return sums


def test_the_order_in_which_a_rank_creates_its_groups_decides_no_sum(tmp_path):
    for rank, sums in enumerate(torch_jobs.run(_in_another_order, 4, log_dir=tmp_path)):
        pair, across = [rank & ~1, rank | 1], [rank & ~2, rank | 2]
        assert sums == {
            str(pair): sum(10**r for r in pair),
            str(across): sum(10**r for r in across),
        }


def _unequal_histories():
    commkit.init_process_group("gloo", timeout=SOON)
    if dist.get_rank() < 2:
        for _ in range(3):
            commkit.new_group([0, 1], use_local_synchronization=True)
    result = total(commkit.new_group([0, 1, 2, 3], use_local_synchronization=True), 1)
    commkit.destroy_process_group()
    return result


def test_what_only_some_members_did_before_does_not_matter(tmp_path):
    assert torch_jobs.run(_unequal_histories, 4, log_dir=tmp_path) == [4] * 4


def _random_groups(seed):
    commkit.init_process_group("gloo", timeout=SOON)
    rank, draw = dist.get_rank(), random.Random(seed)
    for _ in range(25):
        ranks = draw.sample(range(5), draw.randint(1, 5))
        desc = draw.choice(["", "a", "b"])
        if rank in ranks:
            group = commkit.new_group(ranks, group_desc=desc, sort_ranks=False)
            assert total(group) == sum(10**member for member in ranks)
            assert dist.get_process_group_ranks(group) == ranks
            if draw.random() < 0.3:
                commkit.destroy_process_group(group)
        else:
            draw.random()
    commkit.destroy_process_group()


@pytest.mark.parametrize("seed", [1, 2])
def test_groups_of_any_ranks_one_after_the_other_always_meet(tmp_path, seed):
    torch_jobs.run(_random_groups, 5, seed, log_dir=tmp_path)


def _given_in_many_ways():
    commkit.init_process_group("gloo", timeout=SOON)
    ways = [
        torch.tensor([0, 1]),
        numpy.array([0, 1]),
        range(2),
        {1, 0},
        [numpy.int64(0), torch.tensor(1)],
        None,
    ]
    got = []
    for way in ways:
        group = commkit.new_group(way)
        tensor = torch.tensor([dist.get_rank() + 7])
        dist.broadcast(tensor, src=0, group=group)
        got.append((dist.get_process_group_ranks(group), tensor.item()))
    refused = {}
    for wrong in ([1, 1], [0, 7], [-1, 0], [], ("0", "1")):
        with pytest.raises((ValueError, TypeError)) as caught:
            commkit.new_group(wrong)
        refused[str(wrong)] = type(caught.value).__name__
    commkit.destroy_process_group()
    return got, refused


def test_ranks_may_be_tensors_arrays_ranges_or_sets_and_wrong_ones_are_refused_alike(tmp_path):
    for got, refused in torch_jobs.run(_given_in_many_ways, 2, log_dir=tmp_path):
        assert got == [([0, 1], 7)] * 6
        assert refused == {
            "[1, 1]": "LayoutError",
            "[0, 7]": "LayoutError",
            "[-1, 0]": "LayoutError",
            "[]": "LayoutError",
            "('0', '1')": "LayoutTypeError",
        }


def _unequal_sizes():
    commkit.init_process_group("gloo", timeout=SOON)
    from commkit import layout

    declared = layout.from_lists(
        {"tp": [[2, 1, 0], [3]], "pp": [[0, 3], [1, 3], [2, 3]]}, 4, overlap=["pp"]
    )
    commkit.new_groups(declared)
    sums = [total(group) for group in (*commkit.get_groups("tp"), *commkit.get_groups("pp"))]
    order = dist.get_process_group_ranks(commkit.get_group("tp"))
    try:
        commkit.get_group("pp")
        several = ""
    except commkit.UsageError as error:
        several = str(error)
    commkit.destroy_process_group()
    return sums, order, several


def test_groups_of_unequal_size_and_of_ranks_that_are_in_several(tmp_path):
    results = torch_jobs.run(_unequal_sizes, 4, log_dir=tmp_path)
    for rank in range(3):
        assert results[rank] == ([111, 10**rank + 1000], [2, 1, 0], "")
    sums, order, several = results[3]
    assert sums == [1000, 1001, 1010, 1100] and order == [3]
    assert several.startswith("rank 3 is in 3 groups of family 'pp'")


def _alone():
    commkit.init_process_group("gloo", timeout=SOON)
    rank, world = dist.get_rank(), dist.get_world_size()
    single = [[r] for r in range(world)]
    commkit.new_groups({"first": single})

    def opened():
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    for number in range(10):
        commkit.new_groups({f"one{number}": single})
    grown = opened() - before
    group = commkit.get_group("one3")
    gathered = [torch.zeros(2)]
    dist.all_gather(gathered, torch.full((2,), rank + 1.0), group=group)
    dist.barrier(group=group)
    scattered = torch.zeros(1)
    dist.scatter(scattered, [torch.ones(1) * 5], src=rank, group=group)
    result = (grown, total(group, 1), gathered[0].tolist(), scattered.item())
    commkit.destroy_process_group()
    return result


def test_a_group_of_one_opens_nothing_and_works(tmp_path):
    results = torch_jobs.run(_alone, 3, log_dir=tmp_path)
    assert results == [(0, 1, [rank + 1.0] * 2, 5.0) for rank in range(3)]


def _splits():
    commkit.init_process_group("gloo", timeout=SOON)
    rank = dist.get_rank()
    parent = commkit.new_group([1, 2, 3, 5])
    if rank not in (1, 2, 3, 5):
        commkit.destroy_process_group()
        return None
    # No collective has run on the parent yet, nor on the default group.
    half = commkit.split_group(parent, [[0, 3], [2, 1]])
    sums = [total(half)]
    part = commkit.split_group(parent, [[0, 1]])
    sums.append(total(part) if part is not None else None)
    sums.append(total(commkit.split_group(half, [[0], [1]])))
    with pytest.raises(commkit.LayoutError, match="rank 1 of the parent is in splits 0 and 1"):
        commkit.split_group(parent, [[0, 1], [1, 2]])
    with pytest.raises(commkit.LayoutError, match="rank 4 is outside a world of 4"):
        commkit.split_group(parent, [[0, 4]])
    commkit.destroy_process_group()
    return sums


def test_a_split_is_of_the_parents_own_ranks_and_needs_nothing_of_the_parent(tmp_path):
    results = torch_jobs.run(_splits, 6, log_dir=tmp_path)
    assert results == [
        None,
        [100010, 110, 10],
        [1100, 110, 100],
        [1100, None, 1000],
        None,
        [100010, None, 100000],
    ]


def _mesh():
    commkit.init_process_group("gloo", timeout=SOON, layout="tp=2,dp=4")
    layout_group = commkit.get_group("tp")
    mesh = commkit.device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    same = mesh.get_group("tp") is layout_group
    sums = [total(mesh.get_group("dp")), total(mesh["tp"].get_group())]
    other = commkit.device_mesh("cpu", (2, 2, 2))
    sums += [total(other.get_group(dim)) for dim in range(3)]
    line = commkit.device_mesh("cpu", (8,), mesh_dim_names=("all",))
    sums.append(total(line.get_group()))
    commkit.destroy_process_group()
    return same, sums, list(mesh.get_coordinate())


def test_a_mesh_takes_the_groups_that_exist_and_makes_the_others(tmp_path):
    for rank, (same, sums, place) in enumerate(torch_jobs.run(_mesh, 8, log_dir=tmp_path)):
        tp, dp = [rank & ~1, rank | 1], [r for r in range(8) if r % 2 == rank % 2]
        cube = [[r for r in range(8) if r & ~bit == rank & ~bit] for bit in (4, 2, 1)]
        expected = [sum(10**r for r in ranks) for ranks in (dp, tp, *cube, range(8))]
        assert (same, sums, place) == (True, expected, [rank // 2, rank % 2])


def _life():
    commkit.init_process_group("gloo", timeout=SOON)
    halves = {"a": [[0, 1], [2, 3]], "b": [[0, 1], [2, 3]], "c": [[0, 2]]}
    made = commkit.new_groups(halves, share=True)
    shared = made["a"] is made["b"]
    member = "c" in made
    outside = commkit.get_group("c") is dist.GroupMember.NON_GROUP_MEMBER
    try:
        commkit.new_groups({"a": [[0, 1]]})
        twice = ""
    except commkit.UsageError as error:
        twice = str(error)
    old = commkit.get_group("a")
    commkit.new_groups({"a": [[3, 2, 1, 0]]}, replace=True)
    # The other family's as well, so it is kept until that one is replaced.
    sums = [total(commkit.get_group("b"), 1)]
    commkit.new_groups({"b": [[0, 1, 2, 3]]}, replace=True)
    gone = old not in dist.distributed_c10d._world.pg_map
    order = dist.get_process_group_ranks(commkit.get_group("a"))
    sums.append(total(commkit.get_group("a")))
    commkit.destroy_process_group(commkit.get_group("a"))
    left = commkit.get_groups("a")
    commkit.new_groups({"later": [[0, 1, 2, 3]], "a": [[0, 1, 2, 3]]})
    sums.append(total(commkit.get_group("later")))
    try:
        commkit.get_group("d")
        unknown = ""
    except commkit.UsageError as error:
        unknown = str(error)
    commkit.destroy_process_group()
    return shared, member != outside, twice, gone, order, sums, left, unknown


def test_families_are_shared_replaced_destroyed_and_added(tmp_path):
    for shared, member, twice, gone, order, sums, left, unknown in torch_jobs.run(
        _life, 4, log_dir=tmp_path
    ):
        assert shared and member and gone
        assert twice.startswith("family 'a' exists already")
        assert (order, sums, left) == ([3, 2, 1, 0], [2, 1111, 1111], [])
        assert unknown == "no family is called 'd'; there are: a, b, c, later"


def _exists_on_some():
    commkit.init_process_group("gloo", timeout=SOON, layout={"a": [[0, 1]]})
    with pytest.raises(commkit.DigestMismatch) as caught:
        commkit.new_groups({"a": [[0, 1]]})
    commkit.destroy_process_group()
    return str(caught.value)


def test_a_family_that_exists_is_refused_at_once_on_ranks_that_are_not_in_it_too(tmp_path):
    for text in torch_jobs.run(_exists_on_some, 3, log_dir=tmp_path):
        assert "rank 2 (host " in text and "'a' exists already" in text


def _per_family():
    commkit.init_process_group("gloo", timeout=SOON)
    commkit.new_groups(
        "tp=2,dp=2",
        timeout={"tp": datetime.timedelta(seconds=33)},
        backend={"dp": "cpu:gloo"},
    )
    made = {one.family: one for one in groups.timings()[1]}
    kinds = {name: one.backend for name, one in made.items()}
    errors = []
    for wrong in ({"timeout": {"pp": SOON}}, {"backend": {"x": "gloo"}}, {"timeout": 3}):
        with pytest.raises(commkit.UsageError) as caught:
            commkit.new_groups({"z": [[0, 1]]}, **wrong)
        errors.append(str(caught.value))
    sums = [total(commkit.get_group(name)) for name in ("tp", "dp")]
    commkit.destroy_process_group()
    return kinds, errors, sums


def test_timeouts_and_back_ends_of_single_families(tmp_path):
    results = torch_jobs.run(_per_family, 4, log_dir=tmp_path)
    for kinds, errors, _ in results:
        assert kinds == {"tp": "gloo", "dp": "cpu:gloo"}
        assert errors[0] == "timeout for family 'pp', which the layout does not have; it has z"
        assert errors[1].startswith("backend for family 'x'")
        assert errors[2] == "timeout=3: expected a positive datetime.timedelta"
    assert [sums for _, _, sums in results] == [[11, 101], [11, 1010], [1100, 101], [1100, 1010]]


def _cycles():
    late = 0.4 if os.environ["RANK"] == "3" else 0.0
    for cycle in range(12):
        commkit.init_process_group("gloo", timeout=SOON, layout="tp=2,dp=2")
        assert total(commkit.get_group("dp"), cycle) == 2 * cycle
        time.sleep(late if cycle % 4 == 0 else 0)
        commkit.destroy_process_group()
        with pytest.raises(ValueError, match="has not been initialized"):
            commkit.get_group("tp")
    return len(os.listdir("/proc/self/fd"))


def test_the_groups_of_one_world_are_not_those_of_the_next(tmp_path):
    torch_jobs.run(_cycles, 4, log_dir=tmp_path)


def test_the_same_script_runs_on_stock_torch(tmp_path):
    families = ("tp", "dp")
    on = torch_jobs.run(_layout, 4, "tp=2,dp=2", families, log_dir=tmp_path)
    off = torch_jobs.run(
        _layout, 4, "tp=2,dp=2", families, env={"COMMKIT_DISABLE": "1"}, log_dir=tmp_path
    )
    assert on == off
