"""DDP, FSDP2 and tensor parallelism train on the rig as one process on the CPU does."""

from __future__ import annotations

import copy

import arithmetic
import pytest
import rig_ranks as ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from worlds import begun

# DDP imports it in its constructor, ten seconds a rank.
ranks.preload("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")

STEPS = 3


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def _batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 8, generator=generator) for _ in range(STEPS)]


def _train(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()


def _expected(size):
    """What one process makes of the batches of all ranks."""
    model = _model()
    whole = [torch.cat(parts) for parts in zip(*map(_batches, range(size)), strict=True)]
    _train(model, whole)
    return list(model.parameters())


def _same(parameters, size):
    pairs = zip(parameters, _expected(size), strict=True)
    return [torch.allclose(mine.cpu(), theirs, atol=1e-5) for mine, theirs in pairs]


def _ddp(start):
    arithmetic.install()
    with begun(start):
        model = DistributedDataParallel(_model().cuda(), device_ids=[torch.cuda.current_device()])
        _train(model, [batch.cuda() for batch in _batches(dist.get_rank())])
        return _same(model.module.parameters(), dist.get_world_size())


def _fsdp(start):
    arithmetic.install()
    with begun(start):
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        model = copy.deepcopy(_model()).cuda()
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh)
        _train(model, [batch.cuda() for batch in _batches(dist.get_rank())])
        whole = [parameter.full_tensor() for parameter in model.parameters()]
        return _same(whole, dist.get_world_size())


def _fsdp_and_tp(start):
    """Two replicas of the batch dimension, each of two ranks that share every layer."""
    arithmetic.install()
    with begun(start):
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
        model = _model().cuda()
        plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
        model[2] = nn.Identity()  # normalisation over a sharded dimension would need gathering
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        _train(model, [batch.cuda() for batch in _batches(mesh["dp"].get_local_rank())])
        whole = [parameter.full_tensor().cpu() for parameter in model.parameters()]

        alone = _model()
        alone[2] = nn.Identity()
        _train(alone, [torch.cat(parts) for parts in zip(_batches(0), _batches(1), strict=True)])
        pairs = zip(whole, alone.parameters(), strict=True)
        return [torch.allclose(mine, theirs, atol=1e-5) for mine, theirs in pairs]


@pytest.mark.parametrize("start", ["stock bound", "commkit"])
@pytest.mark.parametrize("train", [_ddp, _fsdp, _fsdp_and_tp])
def test_training_gives_the_parameters_of_one_process(train, start):
    for result in ranks.run_ranks(4, train, start):
        assert len(result.value) >= 4
        assert all(result.value)


def _alone():
    arithmetic.install()
    ranks.device()
    model = _model().cuda()
    _train(model, [batch.cuda() for batch in _batches(0)])
    return _same(model.parameters(), 1), repr(torch.ones(2, device="cuda") * 3)


def test_arithmetic_on_the_device_is_that_of_the_host():
    (result,) = ranks.run_ranks(1, _alone)
    assert all(result.value[0])
    assert result.value[1] == "tensor([3., 3.], device='cuda:0')"
