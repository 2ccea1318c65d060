"""What callers of torch.distributed see: the same on stock torch and after commkit.patch()."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch_jobs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import commkit
from commkit.api import world

SOON = datetime.timedelta(seconds=30)
FIVE = datetime.timedelta(seconds=5)


def total(group):
    tensor = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


def _sums(mesh):
    """Over each dimension, and this rank's place; None outside the mesh."""
    place = mesh.get_coordinate()
    return place and (list(place), [total(mesh.get_group(dim)) for dim in range(mesh.ndim)])


def _smaller_than_the_world():
    line = DeviceMesh("cpu", torch.tensor([[1, 3]]), mesh_dim_names=("a", "b"))
    return _sums(init_device_mesh("cpu", (1, 2))), _sums(line)


def _in_another_order():
    return _sums(DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]])))


def _flattened():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    both = mesh["x", "y"]._flatten("both")
    return total(both.get_group()), total(mesh["y"].get_group()), both.mesh.tolist()


def _from_groups():
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    grid = torch.arange(4).view(2, 2)
    groups = [columns[rank % 2], rows[rank // 2]]
    return _sums(DeviceMesh.from_group(groups, "cpu", mesh=grid, mesh_dim_names=("p", "q")))


def _monitored():
    group = dist.new_group([0, 2])
    if dist.get_rank() in (0, 2):
        dist.monitored_barrier(group, FIVE)
    dist.monitored_barrier(timeout=SOON)


def _neighbours():
    rank, group = dist.get_rank(), dist.new_group([0, 1, 2, 3])
    mine, got = torch.tensor([float(rank)]), torch.zeros(1)
    send = dist.P2POp(dist.isend, mine, (rank + 1) % 4, group)
    receive = dist.P2POp(dist.irecv, got, (rank - 1) % 4, group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return got.item()


def _objects():
    rank, group = dist.get_rank(), dist.new_group([1, 3])
    if rank not in (1, 3):
        return group == dist.GroupMember.NON_GROUP_MEMBER
    gathered, told, given = [None, None], [rank], [None]
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    dist.broadcast_object_list(told, src=3, group=group)
    dist.scatter_object_list(given, ["a", "b"] if rank == 1 else None, src=1, group=group)
    return gathered, told, given


def _by_tag():
    find = c10d._find_or_create_pg_by_ranks_and_tag
    first, second = (find("mine", [0, 1, 2, 3], 4) for _ in range(2))
    if world() is not None:
        # On stock torch the two halves have one name between them.
        half = find("half", [0, 1, 2, 3], 2)
        assert total(half) == (11 if dist.get_rank() < 2 else 1100)
        if dist.get_rank() == 0:  # there, too, all later groups of this rank would have other names
            assert c10d._new_group_with_tag([0, 1], pg_tag="half") is half
    return first is second, total(first)


def _store():
    group = dist.new_group([0, 1])
    if (rank := dist.get_rank()) > 1:
        return None
    store = c10d._get_process_group_store(group)
    store.set(f"from {rank}", str(rank))
    return store.get(f"from {1 - rank}")


def _refused():
    wrong = [{"backend": "nope"}, {"timeout": 3}, {"ranks": ["0", "1"]}, {"ranks": [0, 9]}]
    texts = []
    for arguments in wrong:
        try:
            dist.new_group(**{"ranks": [0, 1], **arguments})
        except Exception as error:
            texts.append((type(error).__name__, str(error)))
    return texts


def _world():
    group = dist.group.WORLD
    names = group.group_name, group.group_desc, dist.get_backend(), dist.get_backend_config()
    return names


def _counted():
    before = c10d.get_pg_count()
    for ranks in ([0, 1], [2, 3], [1], None):
        dist.new_group(ranks)
    return c10d.get_pg_count() - before


WHAT = (
    *(_smaller_than_the_world, _in_another_order, _flattened, _from_groups, _monitored),
    *(_neighbours, _objects, _by_tag, _store, _refused, _world, _counted),
)


def _all(patched):
    if patched:
        commkit.patch()
    dist.init_process_group("gloo", timeout=SOON)
    assert (world() is not None) == patched
    results = {function.__name__: function() for function in WHAT}
    dist.barrier()
    dist.destroy_process_group()
    return results, dist.is_initialized(), world() is None


def test_meshes_messages_objects_tags_and_errors_are_those_of_stock_torch(tmp_path):
    stock = torch_jobs.run(_all, 4, False, log_dir=tmp_path)
    patched = torch_jobs.run(_all, 4, True, log_dir=tmp_path)
    assert patched == stock
