"""MPI as a back end, through mpi4py: host buffers, no torch.distributed."""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from commkit.measure.backend import Buffer, Unsupported, probe, zeros
from commkit.measure.collectives import ALL_REDUCE, PING_PONG, Collective, uneven
from commkit.measure.numbers import Number
from commkit.measure.operation import Operation

#: torch type -> MPI's; others can be moved as bytes and not be reduced.
_TYPES = {
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.int32: "INT32_T",
    torch.uint32: "UINT32_T",
    torch.int64: "INT64_T",
    torch.uint64: "UINT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
}
_Call: TypeAlias = Callable[[], Any]
_REDOPS = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX"}


class MpiBackend:
    """MPI_COMM_WORLD, or a communicator split from it.

    Initializes MPI when imported.  In place is MPI_IN_PLACE; messages of more than 2**31 - 1
    elements need an MPI of version 4.
    """

    name = "mpi"
    device = torch.device("cpu")
    clock = "monotonic"
    verifies = True

    def __init__(self, communicator: Any = None) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._comm = self._mpi.COMM_WORLD if communicator is None else communicator
        self.rank = int(self._comm.Get_rank())
        self.world_size = int(self._comm.Get_size())
        self.marks: list[int] = []
        library = str(self._mpi.Get_library_version())
        self.versions = {"mpi": " ".join(library.split())[:120]}

    def group(self, color: int | None) -> MpiBackend | None:
        """Collective over this communicator: ranks of one color; None for no color."""
        part = self._comm.Split(self._mpi.UNDEFINED if color is None else color, self.rank)
        return None if color is None else MpiBackend(part)

    def buffer(self, count: int, number: Number) -> Buffer:
        return zeros(count, number, self.device)

    # -- calls

    def _spec(self, buffer: Buffer, reduces: bool, counts: Sequence[int] | None = None) -> Any:
        """[memory, type] or [memory, counts, type] as mpi4py wants them; the tensor's own memory.

        A single count would be that of one rank's part; without one mpi4py divides the memory.
        """
        size = buffer.element_size()
        memory = buffer.view(torch.uint8).numpy()
        name = _TYPES.get(buffer.dtype)
        if name is not None:
            kind = getattr(self._mpi, name)
            return [memory, kind] if counts is None else [memory, list(counts), kind]
        if reduces:
            raise Unsupported(f"MPI cannot reduce {buffer.dtype}".replace("torch.", ""))
        if counts is None:
            return [memory, self._mpi.BYTE]
        return [memory, [count * size for count in counts], self._mpi.BYTE]

    def _redop(self, redop: str) -> Any:
        if redop not in _REDOPS:
            raise Unsupported(f"MPI has no reduction {redop}")
        return getattr(self._mpi, _REDOPS[redop])

    def _bound(self, op: Operation) -> _Call:
        """The call with its arguments made, so that a timed iteration is the call alone."""
        name, comm = op.row.name, self._comm
        place = self._mpi.IN_PLACE
        reduces = op.row.reduces
        redop = self._redop(op.redop) if reduces else None
        send, receive = self._spec(op.send, reduces), self._spec(op.receive, reduces)
        at_root = op.rank == op.root
        call: _Call
        if name == "all_reduce":
            first = place if op.in_place else send
            return lambda: comm.Allreduce(first, receive, redop)
        if name == "all_gather":
            first = place if op.in_place else send
            return lambda: comm.Allgather(first, receive)
        if name == "reduce_scatter":
            return self._reduce_scatter(op, send, receive, redop)
        if name == "all_to_all":
            first = place if op.in_place else send
            return lambda: comm.Alltoall(first, receive)
        if name == "all_to_all_v":
            return self._all_to_all_v(op)
        if name == "broadcast":
            return self._broadcast(op, receive)
        if name == "reduce":
            if not op.in_place:
                return lambda: comm.Reduce(send, receive if at_root else None, redop, op.root)
            if at_root:
                return lambda: comm.Reduce(place, receive, redop, op.root)
            return lambda: comm.Reduce(send, None, redop, op.root)
        if name == "gather":
            first = place if op.in_place and at_root else send
            return lambda: comm.Gather(first, receive if at_root else None, op.root)
        if name == "scatter":
            second = place if op.in_place and at_root else receive
            return lambda: comm.Scatter(send if at_root else None, second, op.root)
        if name == "barrier":
            call = comm.Barrier
            return call
        return self._exchange(op, send, receive)

    def _reduce_scatter(self, op: Operation, send: Any, receive: Any, redop: Any) -> _Call:
        comm = self._comm
        if not op.in_place:
            return lambda: comm.Reduce_scatter_block(send, receive, redop)
        # MPI leaves the result at the start of the buffer, torch and NCCL in the rank's part.
        whole, part = op.send, op.receive
        start = whole[: op.shape.part]

        def call() -> None:
            comm.Reduce_scatter_block(self._mpi.IN_PLACE, send, redop)
            if op.rank:
                part.copy_(start)

        return call

    def _all_to_all_v(self, op: Operation) -> _Call:
        comm, n, part = self._comm, op.world_size, op.shape.part
        into = [uneven(source, n, part)[op.rank] for source in range(n)]
        outgoing = op.staging if op.in_place else op.send
        send = self._spec(outgoing, False, uneven(op.rank, n, part))
        receive = self._spec(op.receive, False, into)
        if not op.in_place:
            return lambda: comm.Alltoallv(send, receive)

        def call() -> None:
            outgoing.copy_(op.send)
            comm.Alltoallv(send, receive)

        return call

    def _broadcast(self, op: Operation, receive: Any) -> _Call:
        comm = self._comm
        if op.in_place or op.rank != op.root:
            return lambda: comm.Bcast(receive, op.root)

        def call() -> None:
            op.receive.copy_(op.send)
            comm.Bcast(receive, op.root)

        return call

    def _exchange(self, op: Operation, send: Any, receive: Any) -> _Call:
        comm = self._comm
        if op.partner is None:
            return lambda: None
        to, source = op.partner
        if op.row is PING_PONG:
            return self._ping_pong(op.rank < to, to, send, receive)
        if op.in_place:
            return lambda: comm.Sendrecv_replace(receive, to, 0, source, 0)
        return lambda: comm.Sendrecv(send, to, 0, receive, source, 0)

    def _ping_pong(self, begins: bool, other: int, send: Any, receive: Any) -> _Call:
        comm = self._comm

        def call() -> None:
            if begins:
                comm.Send(send, other)
            comm.Recv(receive, other)
            if not begins:
                comm.Send(send, other)

        return call

    def run(self, op: Operation) -> None:
        # Kept with the operation: its first call pays for it.
        if op.prepared is None:
            op.prepared = self._bound(op)
        call: Any = op.prepared
        call()

    def caller(self, op: Operation, mode: str, aggregated: int) -> Callable[[], None]:
        if mode != "blocking":
            raise Unsupported(f"mpi: calls are blocking here, {mode} ones are not made")
        if op.prepared is None:
            op.prepared = self._bound(op)
        call: Any = op.prepared
        return lambda: call()

    def all_reduce(self, send: Buffer, receive: Buffer, redop: str) -> None:
        first = self._mpi.IN_PLACE if send is receive else self._spec(send, True)
        self._comm.Allreduce(first, self._spec(receive, True), self._redop(redop))

    def all_gather(self, op: Operation) -> None:
        self.run(op)

    reduce_scatter = all_to_all = all_to_all_v = broadcast = reduce = all_gather
    gather_to = scatter_from = exchange = ping_pong = wait_for_all = all_gather

    # -- time, and talk among the ranks

    def synchronize(self) -> None:
        pass

    def barrier(self) -> None:
        self._comm.Barrier()

    def time(self, call: Callable[[], None], iterations: int) -> list[float]:
        clock = time.perf_counter_ns
        self.marks = marks = [clock()]
        for _ in range(iterations):
            call()
            marks.append(clock())
        return [(b - a) * 1e-9 for a, b in itertools.pairwise(marks)]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        mine = torch.tensor(values, dtype=torch.float64)
        rows = torch.zeros(self.world_size, len(values), dtype=torch.float64)
        self._comm.Allgather(mine.numpy(), rows.numpy())
        found: list[list[float]] = rows.tolist()
        return found

    def gather_text(self, text: str) -> list[str]:
        found: list[str] = self._comm.allgather(text)
        return found

    def supports(self, number: Number, redop: str, row: Collective = ALL_REDUCE) -> str:
        try:
            self.run(probe(row, number, redop, self.rank, self.world_size, self.device))
        except Unsupported as error:
            return str(error)
        except self._mpi.Exception as error:
            return " ".join(str(error).split())
        return ""
