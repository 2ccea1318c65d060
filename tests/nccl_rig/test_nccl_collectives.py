"""Every collective of the real ProcessGroupNCCL delivers right data, however the world started."""

from __future__ import annotations

import os
import warnings

import pytest
import rig_ranks as ranks
import torch
import torch.distributed as dist
from torch.distributed import P2POp, ReduceOp
from worlds import STARTS, begun

WORLDS = [(size, start) for size in (2, 4, 8) for start in STARTS]
LARGE = [
    pytest.param(32, start, marks=pytest.mark.timeout(180)) for start in ("stock bound", "commkit")
]
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32]


def _device(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).cuda()


def _reductions(rank, size):
    """(what, got, expected) of every type and operation."""
    numbers = [r + 1 for r in range(size)]
    operations = {
        ReduceOp.SUM: sum(numbers),
        ReduceOp.MAX: size,
        ReduceOp.MIN: 1,
        ReduceOp.AVG: sum(numbers) / size,
    }
    for dtype in TYPES:
        for operation, expected in operations.items():
            if operation == ReduceOp.AVG and not dtype.is_floating_point:
                expected = int(expected)
            tensor = _device([rank + 1] * 3, dtype)
            dist.all_reduce(tensor, operation)
            want = torch.tensor([expected] * 3).to(dtype).tolist()
            yield f"all_reduce {operation} {dtype}", tensor.cpu().tolist(), want
    scaled = _device([float(rank + 1)])
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    yield "all_reduce premul", scaled.item(), sum(numbers) / 2
    last = _device([float(rank)])
    dist.reduce(last, size - 1)
    if rank == size - 1:
        yield "reduce", last.item(), float(sum(range(size)))
    big = torch.full((1 << 18,), float(rank + 1)).cuda()  # 1 MiB
    dist.all_reduce(big)
    yield "all_reduce 1 MiB", big.cpu().unique().tolist(), [float(sum(numbers))]


def _movements(rank, size):
    parts = [torch.zeros(2).cuda() for _ in range(size)]
    dist.all_gather(parts, _device([rank, rank + 0.5]))
    want = [[r, r + 0.5] for r in range(size)]
    yield "all_gather", [part.cpu().tolist() for part in parts], want
    whole = torch.zeros(2 * size).cuda()
    dist.all_gather_into_tensor(whole, _device([rank, rank + 0.5]))
    yield "all_gather_into_tensor", whole.cpu().tolist(), [value for part in want for value in part]
    mine = torch.zeros(2).cuda()
    dist.reduce_scatter_tensor(mine, torch.arange(2.0 * size).cuda())
    yield "reduce_scatter", mine.cpu().tolist(), [size * 2.0 * rank, size * (2.0 * rank + 1)]
    value = _device([float(rank)])
    dist.broadcast(value, size - 1)
    yield "broadcast", value.item(), size - 1.0
    swapped = torch.zeros(size).cuda()
    dist.all_to_all_single(swapped, (torch.arange(float(size)) + 100 * rank).cuda())
    yield "all_to_all_single", swapped.cpu().tolist(), [100.0 * r + rank for r in range(size)]
    # Rank r gives r + 1 elements to each.
    out = torch.zeros(sum(r + 1 for r in range(size))).cuda()
    dist.all_to_all_single(
        out,
        torch.full(((rank + 1) * size,), float(rank)).cuda(),
        [r + 1 for r in range(size)],
        [rank + 1] * size,
    )
    uneven = [float(r) for r in range(size) for _ in range(r + 1)]
    yield "all_to_all_single uneven", out.cpu().tolist(), uneven
    received = [torch.zeros(1).cuda() for _ in range(size)]
    dist.all_to_all(received, [_device([100.0 * rank + r]) for r in range(size)])
    want = [100.0 * r + rank for r in range(size)]
    yield "all_to_all", [tensor.item() for tensor in received], want
    gathered = [torch.zeros(1).cuda() for _ in range(size)] if rank == 0 else None
    dist.gather(_device([float(rank)]), gathered, 0)
    if gathered:
        yield "gather", [tensor.item() for tensor in gathered], [float(r) for r in range(size)]
    square = _device([0.0])
    squares = [_device([float(r * r)]) for r in range(size)] if rank == 1 else None
    dist.scatter(square, squares, 1)
    yield "scatter", square.item(), float(rank * rank)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    yield "all_gather_object", objects, [{"rank": r} for r in range(size)]
    dist.barrier()


def _messages(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size
    values = [_device([-1.0]), torch.full((1 << 18,), -1.0).cuda()]
    given = [_device([float(rank)]), torch.full((1 << 18,), float(rank)).cuda()]
    batch = [P2POp(dist.isend, tensor, after) for tensor in given]
    batch += [P2POp(dist.irecv, tensor, before) for tensor in values]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    got = [value.cpu().unique().tolist() for value in values]
    yield "batch_isend_irecv", got, [[float(before)], [float(before)]]
    if rank == 0:
        dist.send(_device([7.0]), 1)
    elif rank == 1:
        value = _device([0.0])
        dist.recv(value, 0)
        yield "send and recv", value.item(), 7.0


def _coalesced(rank, size):
    tensors = [_device([float(rank + k)]) for k in range(3)]
    with dist._coalescing_manager(device=tensors[0].device, async_ops=True) as works:
        for tensor in tensors:
            dist.all_reduce(tensor)
    works.wait()
    want = [float(sum(r + k for r in range(size))) for k in range(3)]
    yield "coalesced all_reduce", [tensor.item() for tensor in tensors], want


def _all_collectives(start):
    warnings.simplefilter("ignore")
    with begun(start):
        rank, size = dist.get_rank(), dist.get_world_size()
        checks = [_reductions, _movements, _messages, _coalesced]
        results = [result for check in checks for result in check(rank, size)]
        wrong = [result for result in results if result[1] != result[2]]
    return len(results), wrong


@pytest.mark.parametrize(("size", "start"), [*WORLDS, *LARGE])
def test_collectives_deliver_right_data(size, start):
    results = ranks.run_ranks(size, _all_collectives, start, timeout=170 if size > 8 else 50)
    assert [result.value[1] for result in results] == [[]] * size
    assert all(result.value[0] >= 36 for result in results)
    assert all(result.calls["all_reduce"] >= 28 for result in results)
    assert {result.calls["failed"] for result in results} == {0}


def _asynchronous():
    """What a peer has not joined is pending; the host goes on, and streams keep their order."""
    with begun("stock"):
        rank = dist.get_rank()
        store = dist.distributed_c10d._get_default_store()
        tensor = _device([float(rank + 1)])
        dist.all_reduce(tensor)  # the communicator exists from now on
        torch.cuda.synchronize()
        if rank == 1:
            store.wait(["rank 0 has looked"])
            dist.all_reduce(tensor)
            return tensor.item()
        work = dist.all_reduce(tensor, async_op=True)
        event = torch.cuda.Event()
        work.wait()  # orders the streams, and does not block
        copy = tensor.clone()
        event.record()
        pending = not work.is_completed() and not event.query()
        store.set("rank 0 has looked", "1")
        event.synchronize()
        return pending, work.is_completed(), copy.item()


def test_work_is_pending_until_every_rank_has_joined():
    first, second = ranks.run_ranks(2, _asynchronous)
    assert first.value == (True, True, 6.0)
    assert second.value == 6.0


def test_a_rank_is_a_process_with_a_device():
    (result,) = ranks.run_ranks(1, _where)
    assert result.value == ("cuda:0", 8, True)


def _where():
    chosen = ranks.device()
    return str(chosen), torch.cuda.device_count(), "LD_PRELOAD" in os.environ
