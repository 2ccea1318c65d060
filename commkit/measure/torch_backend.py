"""torch.distributed as a back end: gloo, nccl and whatever else this torch has."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commkit.measure.backend import Buffer, Unsupported, probe, zeros
from commkit.measure.collectives import ALL_REDUCE, Collective, uneven
from commkit.measure.numbers import Number
from commkit.measure.operation import Operation

_REDOPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}
#: Newer torch has other names for these and warns of the old ones.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchBackend:
    """A process group of torch; None is the default one.  Requires that it exists."""

    verifies = True

    def __init__(self, name: str, device: torch.device, group: Any = None) -> None:
        self.name = name
        self.device = device
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.clock = "cuda-events" if device.type == "cuda" else "monotonic"
        self.marks: list[int] = []
        self._setup()

    def _setup(self) -> None:
        self._async = False
        self._pending: list[Any] = []

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def buffer(self, count: int, number: Number) -> Buffer:
        return zeros(count, number, self.device)

    # -- calls

    def run(self, op: Operation) -> None:
        op.row.run(self, op)

    def start(self, op: Operation) -> list[Any]:
        """Issues one call without waiting; what is to be waited for."""
        self._async = True
        try:
            op.row.run(self, op)
        finally:
            self._async = False
        works, self._pending = self._pending, []
        return works

    def caller(self, op: Operation, mode: str, aggregated: int) -> Callable[[], None]:
        run = op.row.run
        if mode == "blocking":
            if aggregated == 1:
                return lambda: run(self, op)

            def several() -> None:
                for _ in range(aggregated):
                    run(self, op)

            return several
        if mode == "graph":
            return self._captured(op, aggregated)
        if mode == "coalesced" and "nccl" in self.name:
            return self._coalesced(op, aggregated)

        # gloo cannot coalesce: there calls in flight together are what comes nearest.
        def issue() -> None:
            works: list[Any] = []
            for _ in range(aggregated):
                works += self.start(op)
                if mode == "async":
                    for work in works:
                        work.wait()
                    works.clear()
            for work in works:
                work.wait()

        return issue

    def _coalesced(self, op: Operation, aggregated: int) -> Callable[[], None]:
        manager: Any = dist.distributed_c10d._coalescing_manager

        def call() -> None:
            with manager(self.group, self.device):
                for _ in range(aggregated):
                    op.row.run(self, op)

        return call

    def _captured(self, op: Operation, aggregated: int) -> Callable[[], None]:
        if self.device.type != "cuda":
            raise Unsupported(f"graphs need a GPU; this rank measures {self.name} on the CPU")
        graph: Any = torch.cuda.CUDAGraph()
        op.row.run(self, op)  # connects: that cannot be captured
        self.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(aggregated):
                op.row.run(self, op)
        replay: Callable[[], None] = graph.replay
        return replay

    def _issued(self, work: Any) -> None:
        if work is not None:
            self._pending.append(work)

    def all_reduce(self, send: Buffer, receive: Buffer, redop: str) -> None:
        if send is not receive:
            receive.copy_(send)
        self._issued(
            dist.all_reduce(receive, _REDOPS[redop], group=self.group, async_op=self._async)
        )

    def all_gather(self, op: Operation) -> None:
        self._issued(_ALL_GATHER(op.receive, op.send, group=self.group, async_op=self._async))

    def reduce_scatter(self, op: Operation) -> None:
        self._issued(
            _REDUCE_SCATTER(
                op.receive, op.send, _REDOPS[op.redop], group=self.group, async_op=self._async
            )
        )

    def _outgoing(self, op: Operation) -> Buffer:
        """What is sent: in place the copy from which the buffer can be overwritten."""
        if not op.in_place:
            return op.send
        op.staging.copy_(op.send)
        return op.staging

    def all_to_all(self, op: Operation) -> None:
        self._issued(
            dist.all_to_all_single(
                op.receive, self._outgoing(op), group=self.group, async_op=self._async
            )
        )

    def all_to_all_v(self, op: Operation) -> None:
        if op.prepared is None:
            n, part = op.world_size, op.shape.part
            into = [uneven(source, n, part)[op.rank] for source in range(n)]
            op.prepared = (into, list(uneven(op.rank, n, part)))
        prepared: Any = op.prepared
        into, outof = prepared
        self._issued(
            dist.all_to_all_single(
                op.receive,
                self._outgoing(op),
                into,
                outof,
                group=self.group,
                async_op=self._async,
            )
        )

    def broadcast(self, op: Operation) -> None:
        if not op.in_place and op.rank == op.root:
            op.receive.copy_(op.send)
        root = self._global(op.root)
        self._issued(dist.broadcast(op.receive, root, group=self.group, async_op=self._async))

    def reduce(self, op: Operation) -> None:
        if not op.in_place:
            op.receive.copy_(op.send)
        root, redop = self._global(op.root), _REDOPS[op.redop]
        self._issued(dist.reduce(op.receive, root, redop, group=self.group, async_op=self._async))

    def gather_to(self, op: Operation) -> None:
        parts = op.receive_parts if op.rank == op.root else None
        root = self._global(op.root)
        self._issued(dist.gather(op.send, parts, root, group=self.group, async_op=self._async))

    def scatter_from(self, op: Operation) -> None:
        parts = op.send_parts if op.rank == op.root else None
        root = self._global(op.root)
        self._issued(dist.scatter(op.receive, parts, root, group=self.group, async_op=self._async))

    def exchange(self, op: Operation) -> None:
        if op.partner is None:
            return
        to, source = self._global(op.partner[0]), self._global(op.partner[1])
        outgoing = self._outgoing(op)
        works: list[Any]
        if "nccl" in self.name:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, outgoing, to, self.group),
                    dist.P2POp(dist.irecv, op.receive, source, self.group),
                ]
            )
        else:
            works = [
                dist.irecv(op.receive, source, group=self.group),
                dist.isend(outgoing, to, group=self.group),
            ]
        if self._async:
            self._pending += works
        else:
            for work in works:
                work.wait()

    def ping_pong(self, op: Operation) -> None:
        if op.partner is None:
            return
        other = self._global(op.partner[0])
        if op.rank < op.partner[0]:
            dist.send(op.send, other, group=self.group)
            dist.recv(op.receive, other, group=self.group)
        else:
            dist.recv(op.receive, other, group=self.group)
            dist.send(op.send, other, group=self.group)

    def wait_for_all(self, op: Operation) -> None:
        devices = [self.device.index] if self.device.type == "cuda" else None
        self._issued(dist.barrier(self.group, self._async, devices))

    # -- time, and talk among the ranks

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        # Not dist.barrier: that one guesses a device where none is bound.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        self.synchronize()

    def time(self, call: Callable[[], None], iterations: int) -> list[float]:
        if self.device.type == "cuda":
            return self._time_with_events(call, iterations)
        clock = time.perf_counter_ns
        self.marks = marks = [clock()]
        for _ in range(iterations):
            call()
            marks.append(clock())
        return [(b - a) * 1e-9 for a, b in itertools.pairwise(marks)]

    def _time_with_events(self, call: Callable[[], None], iterations: int) -> list[float]:
        # Events are ordered on the device, so the host's launch time does not count.
        event: Any = torch.cuda.Event  # torch leaves it untyped
        marks = [event(enable_timing=True) for _ in range(iterations + 1)]
        self.marks = []
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
            self.marks.append(0)
        self.synchronize()
        return [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(marks)]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine, group=self.group)
        return [row.tolist() for row in rows]

    def gather_text(self, text: str) -> list[str]:
        data = text.encode()
        longest = max(int(row[0]) for row in self.gather([len(data)]))
        padded = bytearray(data.ljust(longest + 1, b"\0"))
        mine = torch.frombuffer(padded, dtype=torch.uint8).to(self.device)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine, group=self.group)
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in rows]

    def supports(self, number: Number, redop: str, row: Collective = ALL_REDUCE) -> str:
        """Tries the smallest call.  Libraries refuse a type on every rank alike."""
        try:
            op = probe(row, number, redop, self.rank, self.world_size, self.device)
            self.run(op)
            self.synchronize()
        except Unsupported as error:
            return str(error)
        except (RuntimeError, ValueError, TypeError) as error:
            text = str(error).partition("\n")[0]
            # A lost connection is a RuntimeError too, and must not pass for a refusal.
            if isinstance(error, RuntimeError) and not _REFUSAL.search(text):
                raise
            return text
        return ""


_REFUSAL = re.compile(
    r"invalid scalar type|can't be cast|unsupported|not supported|not implemented|unconvertible"
    r"|unhandled|cannot use|invalid (data|scalar|reduction)|requires nccl|float8|unknown type"
    r"|does not support|undefined",
    re.IGNORECASE,
)


class FakeBackend(TorchBackend):
    """torch's `fake` group: one process, calls that do nothing, peers that are only counted.

    For dry runs and for what the harness itself costs.  What a peer would answer is this rank's
    own answer, so every gathered row is the same.
    """

    verifies = False

    def barrier(self) -> None:
        pass

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values) for _ in range(self.world_size)]

    def gather_text(self, text: str) -> list[str]:
        return [text] * self.world_size
