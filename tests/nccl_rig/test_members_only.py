"""commkit's groups over NCCL: which communicators are made, by whom, and when."""

from __future__ import annotations

import datetime
import os
import time

import pytest
import rig_ranks as ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import commkit
from commkit import api, groups

SOON = datetime.timedelta(seconds=60)
FAMILIES = {"tp": 1, "cp": 2, "dp": 4}  # family -> the bit of a rank that varies inside it


def _total(group):
    tensor = torch.tensor([10.0 ** dist.get_rank()], dtype=torch.float64).cuda()
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


def _start(bound, patched=False, **options):
    device = ranks.device()
    if bound:
        options["device_id"] = device
    if patched:
        commkit.patch()
        dist.init_process_group("nccl", timeout=SOON, **options)
    else:
        commkit.init_process_group("nccl", timeout=SOON, **options)
    return dist.get_rank()


def _members(rank, size, bit):
    return [other for other in range(size) if other & ~bit == rank & ~bit]


def _native(bound, options):
    rank = _start(bound, layout="tp=2,cp=2,dp=2" if not options else None)
    if options:
        commkit.new_groups("tp=2,cp=2,dp=2", **options)
    created = ranks.calls()
    for name, bit in FAMILIES.items():
        group = commkit.get_group(name)
        assert _total(group) == sum(10**other for other in _members(rank, 8, bit))
    used = ranks.calls()
    commkit.destroy_process_group()
    return created, used


@pytest.mark.parametrize("bound", [False, True])
def test_each_group_is_one_communicator_made_by_its_members(bound):
    for result in ranks.run_ranks(8, _native, bound, {}):
        created, used = result.value
        # The default group's, and one a family; without a device each when it is first used.
        assert created["created"] == (4 if bound else 0)
        assert used["created"] == (4 if bound else 3)
        assert used["split"] == used["split_no_color"] == 0


def _patched(bound):
    rank = _start(bound, patched=True)
    mine = []
    # As Megatron does: every rank calls for every group.
    for bit in FAMILIES.values():
        for first in [other for other in range(8) if not other & bit]:
            members = [first, first | bit]
            group = dist.new_group(members)
            if rank in members:
                mine.append((group, members))
    created = ranks.calls()
    for group, members in mine:
        assert _total(group) == sum(10**other for other in members)
    used = ranks.calls()
    dist.destroy_process_group()
    return created, used


@pytest.mark.parametrize("bound", [False, True])
def test_torch_s_own_calls_make_members_communicators_only(bound):
    for result in ranks.run_ranks(8, _patched, bound):
        created, used = result.value
        assert created["created"] == (4 if bound else 0)
        assert used["created"] == (4 if bound else 3)
        assert used["split"] == used["split_no_color"] == 0


def _alone_and_shared():
    rank = _start(True)
    single = [[other] for other in range(4)]
    commkit.new_groups({"one": single, "ep": single})
    before = ranks.calls()["created"]
    commkit.new_groups({"a": [[0, 1], [2, 3]], "b": [[0, 1], [2, 3]]}, share=True)
    same = commkit.get_group("a") is commkit.get_group("b")
    after = ranks.calls()["created"]
    # A group of one works, once it is used.
    assert _total(commkit.get_group("one")) == 10**rank
    commkit.destroy_process_group()
    return before, after, same


def test_a_group_of_one_has_no_communicator_and_equal_ranks_share_one_on_request():
    for result in ranks.run_ranks(4, _alone_and_shared):
        assert result.value == (1, 2, True)


def _mesh(patched):
    rank = _start(True, patched=patched)
    if patched:
        mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    else:
        mesh = commkit.device_mesh("cuda", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    calls = ranks.calls()
    for name, bit in FAMILIES.items():
        assert _total(mesh.get_group(name)) == sum(10**r for r in _members(rank, 8, bit))
    dist.destroy_process_group()
    return calls["split"], calls["split_no_color"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("patched", [False, True])
def test_a_mesh_takes_no_split_of_the_world_for_each_group(patched):
    for result in ranks.run_ranks(8, _mesh, patched, timeout=110):
        # torch's own mesh makes one split for all the groups of a dimension.
        assert result.value == ((3 if patched else 0), 0)


def _split_mode():
    rank = _start(True, layout="tp=2,dp=2")
    assert _total(commkit.get_group("dp")) == sum(10**r for r in _members(rank, 4, 2))
    commkit.new_groups({"some": [[0, 3]]})
    if rank in (0, 3):
        assert _total(commkit.get_group("some")) == 1001
    calls = ranks.calls()
    commkit.destroy_process_group()
    return calls["created"], calls["split"], calls["split_no_color"]


def test_one_split_for_a_family_is_the_other_way():
    results = ranks.run_ranks(4, _split_mode, env={"COMMKIT_GROUPS": "split"})
    assert [result.value for result in results] == [(4, 3, 0), (3, 3, 1), (3, 3, 1), (4, 3, 0)]


def _one_stays_away():
    rank = _start(True)
    limit = datetime.timedelta(seconds=4)
    if rank == 2:
        with pytest.raises(RuntimeError):
            commkit.new_group([2, 3], timeout=limit, group_desc="other")
        return None
    with pytest.raises(commkit.CommkitError) as caught:
        commkit.new_group([0, 1, 2] if rank < 3 else [1, 3], timeout=limit)
    return str(caught.value)


def test_a_member_that_creates_something_else_is_named_at_the_deadline():
    results = ranks.run_ranks(4, _one_stays_away)
    for rank in (0, 1):
        assert "rank 2 did not come (rank 2 created 'other' [2-3])" in results[rank].value


def _many():
    rank = _start(True, layout="tp=4,cp=2,dp=4")
    sums = {name: _total(commkit.get_group(name)) // 10**0 if name else 0 for name in ("tp", "cp")}
    calls = ranks.calls()
    threads = {one.family for one in groups.timings()[1]}
    commkit.destroy_process_group()
    return rank, sums["tp"] > 0, calls["created"], calls["split"], threads


@pytest.mark.timeout(200)
def test_thirty_two_ranks_create_theirs_at_the_same_time():
    for result in ranks.run_ranks(32, _many, timeout=180):
        rank, right, created, split, families = result.value
        assert right and created == 4 and split == 0 and families == {"tp", "cp", "dp"}
        assert rank < int(os.environ.get("WORLD_SIZE", "32"))


def _binds(index):
    os.environ["LOCAL_RANK"] = str(index)
    torch.cuda.set_device(0)
    with pytest.raises(commkit.CommkitError) as caught:
        commkit.init_process_group("nccl", timeout=SOON, device_id=torch.device("cuda", index))
    return type(caught.value).__name__, str(caught.value)


def test_two_ranks_on_one_device_are_an_error_that_names_both():
    results = ranks.run_ranks(2, _binds, 1)
    texts = dict(result.value for result in results)
    said = texts["LaunchError"]
    assert "binds cuda:1 (UUID " in said and "as cuda:1 on host" in said
    assert {"rank 0 binds", "rank 1 binds"} & {said[:12]}


def _binds_by_itself(patched, chosen):
    if chosen:
        torch.cuda.set_device(chosen[int(os.environ["RANK"])])
    if patched:
        commkit.patch()
        dist.init_process_group("nccl", timeout=SOON)
    else:
        commkit.init_process_group("nccl", timeout=SOON)
    bound = dist.group.WORLD.bound_device_id
    dist.barrier()  # torch takes the bound device, or guesses
    dist.destroy_process_group()
    return None if bound is None else bound.index


def _on_one_host(size, body, *arguments):
    with ranks.torch_jobs.Job(size, env={"NCCL_HOSTID": "host"}) as job:
        for rank in range(size):
            job.start(rank, body, *arguments)
        outcomes = job.outcomes()
    assert not any(outcome.error for outcome in outcomes.values()), outcomes
    return [outcomes[rank].value for rank in range(size)]


@pytest.mark.parametrize(
    ("patched", "chosen", "bound"),
    [(False, None, [0, 1]), (False, [3, 2], [3, 2]), (True, None, [None, None])],
)
def test_a_rank_binds_the_device_it_has_chosen_or_that_of_its_local_rank(patched, chosen, bound):
    assert _on_one_host(2, _binds_by_itself, patched, chosen) == bound


def _has_perhaps_no_device():
    commkit.init_process_group("nccl", timeout=SOON)
    bound = dist.group.WORLD.bound_device_id
    commkit.destroy_process_group()
    return bound


def test_no_rank_binds_a_device_if_one_has_none_of_its_own():
    size = ranks.DEVICES + 1
    assert _on_one_host(size, _has_perhaps_no_device) == [None] * size


def test_a_device_that_is_not_visible_is_an_error_before_anybody_is_waited_for():
    kind, said = ranks.run_ranks(1, _binds, 9)[0].value
    assert kind == "LaunchError"
    assert said.startswith("device_id=device(type='cuda', index=9): this process sees cuda:0 to 7")


def _several_ids():
    rank = _start(True)
    calls = ranks.calls()
    group = commkit.new_group(list(range(8)))
    assert _total(group) == 11111111
    commkit.destroy_process_group()
    return rank, calls, ranks.calls()


def test_several_ids_for_a_communicator_reach_its_ranks():
    for result in ranks.run_ranks(8, _several_ids, env={"TORCH_NCCL_RANKS_PER_ROOT": "3"}):
        _, before, after = result.value
        assert before["created"] == 1 and after["created"] == 2
        assert after["init_rank_scalable"] == 2


def _dies_inside():
    rank = int(os.environ["RANK"])
    if rank == 2:
        # It has joined, and ends where the others already make the communicator.
        claim = commkit.api.devices.claim

        def claim_and_leave(*arguments):
            claim(*arguments)
            commkit.api.attend = lambda *_: os._exit(9)
            return True

        commkit.api.devices.claim = claim_and_leave
    with pytest.raises(commkit.CommkitError) as caught:
        _start(True)
    return type(caught.value).__name__, str(caught.value)


def test_a_rank_that_dies_while_communicators_are_made_leaves_nobody_waiting():
    results = ranks.run_ranks(4, _dies_inside, check=False)
    assert results[2].exit_code == 9
    for rank in (0, 1, 3):
        kind, text = results[rank].value
        assert kind == "RankDied" and "rank 2 (pid " in text


def _fails_and_leaves():
    rank = _start(True)
    limit = datetime.timedelta(seconds=2)
    with pytest.raises(commkit.JoinTimeout):
        commkit.new_group([rank, (rank + 1) % 3], timeout=limit)
    began = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - began


def test_nobody_waits_at_the_end_for_a_group_that_was_not_created():
    for result in ranks.run_ranks(3, _fails_and_leaves):
        assert result.value < api.LEAVE_TIMEOUT / 2


def _comes_late_to_a_split(dies):
    rank = _start(True, patched=True)
    if rank == 1:
        if dies:
            os._exit(3)
        dist.distributed_c10d._get_default_store().wait(["said"], SOON)
        return None
    with pytest.raises(commkit.CommkitError) as caught:
        dist.split_group(split_ranks=[[0, 1], [2]], timeout=datetime.timedelta(seconds=2))
    dist.distributed_c10d._get_default_store().set("said", "")
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("dies", [False, True])
def test_a_split_that_a_rank_does_not_come_to_ends_and_names_it(dies):
    results = ranks.run_ranks(3, _comes_late_to_a_split, dies, check=False)
    for rank in (0, 2):
        kind, text = results[rank].value
        assert text.startswith(f"rank {rank}: group 'split of default_pg' [0-2] (nccl)")
        if dies:
            assert kind == "RankDied" and "rank 1 (pid " in text
        else:
            assert kind == "JoinTimeout" and "rank 1 did not come (rank 1 created no group)" in text


def _local_synchronization():
    rank = _start(True, patched=True)
    total = None
    if rank < 2:  # as torch says of it: the others need not call, and split nothing
        total = _total(dist.new_group([0, 1], use_local_synchronization=rank == 0))
    calls = ranks.calls()
    everybody = _total(dist.new_group())
    dist.destroy_process_group()
    return total, everybody, calls["created"], calls["split"]


def test_members_alone_create_a_group_where_the_device_is_bound():
    results = [result.value for result in ranks.run_ranks(4, _local_synchronization)]
    assert results == [(11, 1111, 2, 0)] * 2 + [(None, 1111, 1, 0)] * 2
