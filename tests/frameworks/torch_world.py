"""What torch itself builds on process groups, in forked ranks on gloo.

    python torch_world.py torch DEADLINE CASE...                         stock torch
    python -m commkit run torch_world.py torch DEADLINE CASE...          the same script
    python torch_world.py commkit DEADLINE CASE...                       commkit's own functions

Each case gets a world of its own.  Prints {case: [what each rank has computed]}: everything in it
follows from the case alone, so that runs can be compared number by number.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from datetime import timedelta

import forked
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict_saver
import torch.distributed.distributed_c10d as c10d
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.rpc as rpc
import torch.distributed.tensor.parallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WORLD = 4
LIMIT = timedelta(seconds=120)


class Stock:
    """torch's functions, as commkit run may have replaced them."""

    def start(self):
        dist.init_process_group("gloo", timeout=LIMIT)

    def mesh(self, shape, names):
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    def group(self, lists, family):
        """This rank's group of a partition of the ranks."""
        mine, _ = dist.new_subgroups_by_enumeration(lists)
        return mine


class Native:
    """commkit's own: the layout is declared when the world starts."""

    def start(self):
        import commkit

        commkit.init_process_group("gloo", timeout=LIMIT, layout=f"tp=2,dp={WORLD // 2}")

    def mesh(self, shape, names):
        import commkit

        return commkit.device_mesh("cpu", shape, mesh_dim_names=names)

    def group(self, lists, family):
        import commkit

        group = commkit.get_group(family)
        assert dist.get_process_group_ranks(group) in lists
        return group


def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def steps(model, batches, optimizer=torch.optim.SGD):
    """Losses of a few steps; `batches` is the seed of this rank's data."""
    optimizer = optimizer(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(batches)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(model):
    """All parameters, gathered if they are sharded."""
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten().tolist()
        for p in model.parameters()
    ]


def fsdp_tp(api, rank):
    """FSDP2 over one dimension of a mesh and tensor parallelism over the other; HSDP after it."""
    mesh = api.mesh((WORLD // 2, 2), ("dp", "tp"))
    model = network()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model[2], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    losses = steps(model, mesh.get_local_rank("dp"))
    hybrid = network()
    hsdp = api.mesh((2, WORLD // 2), ("replicate", "shard"))
    fully_shard(hybrid, mesh=hsdp)
    return {
        "losses": losses,
        "parameters": whole(model),
        "hybrid": [steps(hybrid, rank, torch.optim.AdamW), whole(hybrid)],
        "ranks": [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("dp", "tp")],
    }


def ddp(api, rank):
    """DDP over all ranks, over a group of some, and with ranks that run out of data first."""
    everywhere = DistributedDataParallel(network(), bucket_cap_mb=0.0005)
    pairs = [[0, 2], [1, 3]]
    some = DistributedDataParallel(network(), process_group=api.group(pairs, "dp"))
    uneven = DistributedDataParallel(network())
    inputs = [torch.full((2, 8), float(rank + index)) for index in range(rank + 1)]
    with uneven.join():
        for one in inputs:
            uneven(one).sum().backward()
    return {
        "all": [steps(everywhere, rank), whole(everywhere)],
        "some": [steps(some, rank), whole(some)],
        "uneven": [p.grad.flatten().tolist() for p in uneven.parameters()],
    }


def dtensor(api, rank):
    """Products and redistributions over a mesh, its parts, and dimensions made one."""
    mesh = api.mesh((WORLD // 2, 2), ("dp", "tp"))
    left = torch.arange(32.0).view(8, 4)
    right = torch.arange(32.0).view(4, 8) - 7
    a = distribute_tensor(left, mesh, [Shard(0), Shard(1)])
    b = distribute_tensor(right, mesh, [Replicate(), Shard(0)])
    product = a @ b
    assert any(isinstance(place, Partial) for place in product.placements), product.placements
    flat = mesh["dp", "tp"]._flatten("all")
    spread = distribute_tensor(left, flat, [Shard(0)]).redistribute(flat, [Shard(1)])
    turned = product.redistribute(mesh, [Shard(1), Shard(0)])
    return {
        "product": product.full_tensor().tolist(),
        "turned": turned.to_local().tolist(),
        "spread": spread.to_local().tolist(),
        "sum": a.sum().full_tensor().item(),
        "norm": nn.utils.get_total_norm([turned]).full_tensor().item(),
        "flat": dist.get_process_group_ranks(flat.get_group()),
    }


def _collectives(mesh, rank):
    def run(x):
        x = funcol.all_reduce(x, "sum", mesh["dp"])
        x = funcol.all_gather_tensor(x, 0, mesh["tp"])
        x = x * 2 + 1
        x = funcol.reduce_scatter_tensor(x, "sum", 0, (mesh, 1))
        return funcol.all_reduce(x, "max", dist.group.WORLD.group_name)

    return run, torch.arange(8.0).view(4, 2) * (rank + 1)


def functional(api, rank):
    """Functional collectives, as they are and in a graph; groups that they make from ranks."""
    mesh = api.mesh((WORLD // 2, 2), ("dp", "tp"))
    run, x = _collectives(mesh, rank)
    graph = torch.compile(run, backend="aot_eager", fullgraph=True)
    mine = dist.get_process_group_ranks(mesh.get_group("tp"))
    # What is named by ranks and a tag is created when it is first asked for.  (All ranks in one
    # group: with two at a time stock torch gives both the same keys, and hangs.)
    everyone = [*range(WORLD)]
    tagged = c10d._find_or_create_pg_by_ranks_and_tag("mine", everyone, WORLD)
    assert c10d._find_or_create_pg_by_ranks_and_tag("mine", everyone, WORLD) is tagged
    return {
        "eager": run(x).tolist(),
        "graph": graph(x).tolist(),
        "ranks": funcol.all_reduce(x, "sum", mine).tolist(),
        "tagged": funcol.all_reduce(x, "sum", tagged).tolist(),
    }


def inductor(api, rank):
    """The same in code that torch generates and has the C++ compiler compile."""
    mesh = api.mesh((WORLD // 2, 2), ("dp", "tp"))
    run, x = _collectives(mesh, rank)
    return torch.compile(run, fullgraph=True)(x).tolist()


def pipeline(api, rank):
    """Stages of a pipeline, by two ranks each: what torch.distributed.pipelining sends."""
    mesh = api.mesh((2, WORLD // 2), ("pp", "dp"))
    stage_of = mesh.get_local_rank("pp")
    layers = network()
    part = nn.Sequential(*layers[:2]) if stage_of == 0 else nn.Sequential(*layers[2:])
    stage = torch.distributed.pipelining.PipelineStage(
        part, stage_of, 2, torch.device("cpu"), group=mesh.get_group("pp")
    )
    schedule = torch.distributed.pipelining.Schedule1F1B(
        stage, 4, loss_fn=lambda out, target: (out - target).square().mean()
    )
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))
    losses = []
    if stage_of == 0:
        schedule.step(data)
    else:
        schedule.step(target=torch.ones(8, 4), losses=losses)
    gradients = [p.grad.flatten().tolist() for p in part.parameters()]
    return {"losses": [loss.item() for loss in losses], "gradients": gradients}


def _doubled(x):
    return x * 2


def remote_calls(api, rank):
    """RPC beside the default group: calls, remote references, then collectives again."""
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=WORLD,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=60),
    )
    to = f"worker{(rank + 1) % WORLD}"
    answer = rpc.rpc_sync(to, _doubled, args=(torch.full((2,), float(rank)),))
    kept = rpc.remote(to, torch.add, args=(torch.ones(2), rank)).to_here()
    rpc.shutdown()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return {"answer": answer.tolist(), "remote": kept.tolist(), "sum": total.item()}


def saved_in_a_process(api, rank):
    """DCP's asynchronous save by a process of its own, twice, then by a thread; loaded again."""
    mesh = api.mesh((WORLD,), ("dp",))
    model = network()
    fully_shard(model, mesh=mesh)
    steps(model, rank)
    place = [tempfile.mkdtemp(prefix="dcp-") if rank == 0 else None]
    dist.broadcast_object_list(place)
    kinds = torch.distributed.checkpoint.state_dict_saver.AsyncCheckpointerType
    found = {}
    for number, kind in enumerate((kinds.PROCESS, kinds.PROCESS, kinds.THREAD)):
        path = os.path.join(place[0], str(number))
        state = {"model": model.state_dict(), "number": number}
        dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=kind).result()
        empty = network()
        nn.init.zeros_(empty[0].weight)
        fully_shard(empty, mesh=mesh)
        into = {"model": empty.state_dict(), "number": -1}
        dcp.load(into, checkpoint_id=path)
        found[number] = [into["number"], whole(empty)]
        assert whole(empty) == whole(model)
        steps(model, rank)
    return found


CASES = {
    case.__name__: case
    for case in (
        fsdp_tp,
        ddp,
        dtensor,
        functional,
        inductor,
        pipeline,
        remote_calls,
        saved_in_a_process,
    )
}


def body(name, native):
    api = Native() if native else Stock()
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    api.start()
    by_commkit = forked.by_commkit()
    found = CASES[name](api, rank)
    names = [group.group_name for group in c10d._world.pg_map]
    with contextlib.suppress(Exception):
        dist.barrier()
    dist.destroy_process_group()
    return {"found": found, "by_commkit": by_commkit, "names": names}


def main():
    api, deadline, *names = sys.argv[1:]
    forked.report(
        forked.each(
            names,
            lambda name: forked.run(WORLD, body, name, api == "commkit", deadline=float(deadline)),
        )
    )


if __name__ == "__main__":
    main()
