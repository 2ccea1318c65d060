"""NCCL itself through cupy: no process group of torch in the way; its start is timed apart."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from commkit.measure.backend import Buffer, Unsupported, probe
from commkit.measure.collectives import ALL_REDUCE, Collective, uneven
from commkit.measure.numbers import Number
from commkit.measure.operation import Operation
from commkit.measure.torch_backend import TorchBackend

_REDOPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}  # ncclRedOp_t
#: ncclDataType_t of nccl.h; the 8-bit floats are there since NCCL 2.24.
_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
    torch.float8_e4m3fn: 10,
    torch.float8_e5m2: 11,
}
_FLOAT8 = 22400


class CupyBackend(TorchBackend):
    """A communicator of NCCL for the ranks of `control`, which carries their talk (gloo).

    `created` are the seconds that making the communicator took on this rank.
    """

    def __init__(self, control: TorchBackend, device: torch.device) -> None:
        self._nccl: Any = importlib.import_module("cupy.cuda.nccl")
        self._cupy: Any = importlib.import_module("cupy")
        super().__init__("cupy-nccl", device, control.group)
        self._control = control
        self._cupy.cuda.Device(device.index).use()
        unique = self._nccl.get_unique_id() if self.rank == 0 else ()
        shared = control.gather_text(",".join(str(int(byte)) for byte in unique))[0]
        identifier = tuple(int(byte) for byte in shared.split(","))
        began = time.perf_counter()
        self._comm: Any = self._nccl.NcclCommunicator(self.world_size, identifier, self.rank)
        self.created = time.perf_counter() - began
        self.versions = {"nccl": str(self._nccl.get_version()), "cupy": self._cupy.__version__}

    def caller(self, op: Operation, mode: str, aggregated: int) -> Callable[[], None]:
        if mode == "graph":
            return self._captured(op, aggregated)

        def call() -> None:
            with self._grouped(aggregated > 1):
                for _ in range(aggregated):
                    op.row.run(self, op)

        return call

    def start(self, op: Operation) -> list[Any]:
        op.row.run(self, op)  # ordered on the stream: nothing to wait for but the stream
        return []

    @contextlib.contextmanager
    def _grouped(self, several: bool = True) -> Iterator[None]:
        if several:
            self._nccl.groupStart()
        try:
            yield
        finally:
            if several:
                self._nccl.groupEnd()

    def _type(self, buffer: Buffer) -> int:
        kind = _TYPES.get(buffer.dtype)
        if kind is None or (kind >= 10 and int(self._nccl.get_version()) < _FLOAT8):
            raise Unsupported(f"NCCL {self._nccl.get_version()} has no type {buffer.dtype}")
        return kind

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def all_reduce(self, send: Buffer, receive: Buffer, redop: str) -> None:
        self._comm.allReduce(
            send.data_ptr(),
            receive.data_ptr(),
            receive.numel(),
            self._type(receive),
            _REDOPS[redop],
            self._stream(),
        )

    def all_gather(self, op: Operation) -> None:
        self._comm.allGather(
            op.send.data_ptr(),
            op.receive.data_ptr(),
            op.shape.part,
            self._type(op.send),
            self._stream(),
        )

    def reduce_scatter(self, op: Operation) -> None:
        self._comm.reduceScatter(
            op.send.data_ptr(),
            op.receive.data_ptr(),
            op.shape.part,
            self._type(op.send),
            _REDOPS[op.redop],
            self._stream(),
        )

    def broadcast(self, op: Operation) -> None:
        self._comm.broadcast(
            op.send.data_ptr(),
            op.receive.data_ptr(),
            op.shape.part,
            self._type(op.send),
            op.root,
            self._stream(),
        )

    def reduce(self, op: Operation) -> None:
        self._comm.reduce(
            op.send.data_ptr(),
            op.receive.data_ptr(),
            op.shape.part,
            self._type(op.send),
            _REDOPS[op.redop],
            op.root,
            self._stream(),
        )

    def _send(self, part: Buffer, to: int) -> None:
        self._comm.send(part.data_ptr(), part.numel(), self._type(part), to, self._stream())

    def _receive(self, part: Buffer, source: int) -> None:
        self._comm.recv(part.data_ptr(), part.numel(), self._type(part), source, self._stream())

    def all_to_all(self, op: Operation) -> None:
        outgoing = op.parts(self._outgoing(op))
        with self._grouped():
            for rank, (mine, theirs) in enumerate(zip(outgoing, op.receive_parts, strict=True)):
                self._send(mine, rank)
                self._receive(theirs, rank)

    def all_to_all_v(self, op: Operation) -> None:
        n, part = op.world_size, op.shape.part
        into = [uneven(source, n, part)[op.rank] for source in range(n)]
        outgoing = torch.split(self._outgoing(op), list(uneven(op.rank, n, part)))
        incoming = torch.split(op.receive, into)
        with self._grouped():
            for rank, (mine, theirs) in enumerate(zip(outgoing, incoming, strict=True)):
                self._send(mine, rank)
                self._receive(theirs, rank)

    def gather_to(self, op: Operation) -> None:
        with self._grouped():
            self._send(op.send, op.root)
            if op.rank == op.root:
                for rank, part in enumerate(op.receive_parts):
                    self._receive(part, rank)

    def scatter_from(self, op: Operation) -> None:
        with self._grouped():
            self._receive(op.receive, op.root)
            if op.rank == op.root:
                for rank, part in enumerate(op.send_parts):
                    self._send(part, rank)

    def exchange(self, op: Operation) -> None:
        if op.partner is None:
            return
        outgoing = self._outgoing(op)
        with self._grouped():
            self._send(outgoing, op.partner[0])
            self._receive(op.receive, op.partner[1])

    def ping_pong(self, op: Operation) -> None:
        if op.partner is None:
            return
        other = op.partner[0]
        if op.rank < other:
            self._send(op.send, other)
            self._receive(op.receive, other)
        else:
            self._receive(op.receive, other)
            self._send(op.send, other)

    def wait_for_all(self, op: Operation) -> None:
        self.barrier()

    def barrier(self) -> None:
        self.synchronize()
        self._control.barrier()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return self._control.gather(values)

    def gather_text(self, text: str) -> list[str]:
        return self._control.gather_text(text)

    def supports(self, number: Number, redop: str, row: Collective = ALL_REDUCE) -> str:
        try:
            self.run(probe(row, number, redop, self.rank, self.world_size, self.device))
            self.synchronize()
        except Unsupported as error:
            return str(error)
        except self._nccl.NcclError as error:
            return str(error)
        return ""
