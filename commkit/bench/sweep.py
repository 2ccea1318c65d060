"""The sweep of one rank: agree, measure size by size, report from rank 0."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import platform
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

import torch

from commkit import records
from commkit.bench import device as devices
from commkit.bench import table
from commkit.bench.arguments import Arguments
from commkit.bench.placement import Place
from commkit.bench.progress import Bar
from commkit.bench.watch import Watch
from commkit.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_THRESHOLD,
    EXIT_WRONG_DATA,
    CommkitError,
    UsageError,
)
from commkit.measure.backend import TorchBackend, Unsupported
from commkit.measure.collectives import Collective
from commkit.measure.engine import Job, Placement, Result, measure
from commkit.measure.numbers import Number
from commkit.version import VERSION

#: Verification works in pieces; this covers its temporaries besides the two buffers.
_ROOM = 128 << 20


@dataclass(frozen=True, slots=True)
class Hello:
    """What ranks tell one another before anything is measured."""

    host: str
    hostname: str
    pid: int
    device: str
    index: int | None  # of the GPU on its host
    free: int
    plan: str
    versions: dict[str, str]
    environment: dict[str, str]
    trouble: str = ""

    def place(self) -> str:
        return self.device if self.index is None else f"{self.index:2d} {self.device}"

    def dump(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


class Sweep:
    """`run` returns the exit code, the same on every rank."""

    def __init__(
        self,
        arguments: Arguments,
        row: Collective,
        place: Place,
        backend: TorchBackend,
        watch: Watch,
    ) -> None:
        self.arguments = arguments
        self.row = row
        self.place = place
        self.backend = backend
        self.watch = watch
        self.leader = backend.rank == 0
        self.results: list[Result] = []
        self.interrupted = False
        self._writer: records.Writer | None = None
        self._out = sys.stderr if arguments.json == "-" else sys.stdout
        self._hellos: list[Hello] = []
        self._run = uuid.uuid4().hex
        self._last_time, self._last_bytes = 0.0, 0

    def run(self, start_up: float, phases: dict[str, float]) -> int:
        self._hellos = self._agree()
        sizes = self.arguments.sizes()
        pairs, refusals = self._supported()
        self._check_memory(2 * sizes[-1] + _ROOM, sizes[-1])
        self._say(self._header(start_up, phases) + refusals + table.label_lines())
        self.watch.deferring = True
        bar = Bar(len(sizes) * len(pairs), self.leader)
        try:
            for number, redop in pairs:
                if not self.interrupted:
                    self._sweep(number, redop, sizes, bar)
        finally:
            bar.close()
            if self._writer is not None:
                self._writer.close()
        if self.interrupted:
            self._say([f"# interrupted after {_many(len(self.results), 'size')}"])
        self._say(self._slowest() + table.footer_lines(self.results, self.row))
        return self._verdict()

    # -- before the first size

    def _agree(self) -> list[Hello]:
        """Everything that could differ between ranks, compared at once."""
        trouble = ""
        if self.leader and self.arguments.json:
            try:
                self._writer = records.Writer(self.arguments.json)
            except UsageError as error:
                trouble = str(error)
        mine = Hello(
            host=self.place.spec.host.key,
            hostname=self.place.spec.host.hostname,
            pid=os.getpid(),
            device=devices.name(self.backend.device),
            index=self.backend.device.index,
            free=devices.free_memory(self.backend.device, 1),
            plan=hashlib.sha256(repr(self._shared_plan()).encode()).hexdigest(),
            versions=versions(self.backend),
            environment=records.kept_environment(os.environ),
            trouble=trouble,
        )
        hellos = [Hello(**json.loads(text)) for text in self.backend.gather_text(mine.dump())]
        first = hellos[0]
        if first.trouble:
            self._refuse(UsageError(first.trouble))
        for rank, hello in enumerate(hellos):
            if hello.plan != first.plan:
                self._refuse(
                    UsageError(
                        f"rank {rank} ({hello.hostname}) was started with other arguments than "
                        "rank 0; give every rank the same command line"
                    )
                )
        return hellos

    def _shared_plan(self) -> tuple[object, ...]:
        # Only rank 0 writes the file, so its name may differ.
        a = self.arguments
        checks = (a.iterations, a.warmup, a.checks)
        return (self.row.name, a.sizes(), a.numbers, a.redops, checks, bool(a.stock))

    def _refuse(self, error: CommkitError) -> NoReturn:
        """End every rank alike; one of them says why."""
        if self.leader:
            raise error
        raise SystemExit(error.exit_code)

    def _hosts(self) -> int:
        return len({hello.host for hello in self._hellos})

    def _header(self, start_up: float, phases: dict[str, float]) -> list[str]:
        backend, hosts = self.backend, self._hosts()
        world = f"{_many(backend.world_size, 'rank')} on {_many(hosts, 'host')}"
        starter = "torch.distributed" if self.arguments.stock else "commkit"
        parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases.items())
        lines = [
            f"# commkit {VERSION}, torch {torch.__version__}, backend {backend.name}, "
            f"device {backend.device.type}, {world}",
            f"# process group started by {starter} in {start_up:.3f} s"
            + (f" ({parts})" if parts else ""),
        ]
        if hosts == 1 and backend.world_size > 1:
            lines.append("# loopback: all ranks are on one host, no network is measured")
        if backend.world_size == 1:
            lines.append("# single rank: bus bandwidth is not defined")
        lines += self._differences()
        lines += table.plan_lines(self.arguments, self.row)
        lines += table.device_lines([(h.hostname, h.pid, h.place()) for h in self._hellos])
        lines.append(f"# time: median over iterations of the slowest rank ({backend.clock} clock)")
        lines.append(f"# {self.row.copies}")
        return lines

    def _differences(self) -> list[str]:
        """Library versions and settings in which a rank differs from rank 0: the first of each."""
        lines: dict[str, str] = {}
        first = self._hellos[0]
        for rank, hello in enumerate(self._hellos):
            for ours, theirs in (
                (first.versions, hello.versions),
                (first.environment, hello.environment),
            ):
                for name in sorted(ours.keys() | theirs.keys()):
                    a, b = ours.get(name, "unset"), theirs.get(name, "unset")
                    own = name.endswith(("_VISIBLE_DEVICES", "_HOST_ID"))
                    if a != b and name not in lines and not own:
                        lines[name] = f"# warning: {name} is {a} on rank 0, {b} on rank {rank}"
        return list(lines.values())

    def _supported(self) -> tuple[list[tuple[Number, str]], list[str]]:
        """The pairs to sweep, and a line for each that the back end does not have."""
        pairs, refusals = [], []
        for number in self.arguments.numbers:
            for redop in self.arguments.redops:
                self.watch.phase(f"trying {number.name} {redop}")
                refusal = self.backend.supports(number, redop)
                if refusal:
                    refusals.append(f"{number.name} {redop} ({self.backend.name}: {refusal})")
                else:
                    pairs.append((number, redop))
        if not pairs:
            self._refuse(UsageError(f"{self.row.name} is not supported for {'; '.join(refusals)}"))
        return pairs, [f"# not supported: {text}" for text in refusals]

    # -- one type and reduction

    def _sweep(self, number: Number, redop: str, sizes: Sequence[int], bar: Bar) -> None:
        send, receive = self._buffers(number, sizes[-1])
        last_count = -1
        for size in sizes:
            job = Job(
                self.row,
                number,
                redop,
                size,
                self.arguments.iterations,
                self.arguments.warmup,
                self.arguments.checks,
            )
            count = self.row.count(size, number.size, self.backend.world_size)
            bar.advance()
            if count == last_count:
                continue  # rounded to whole elements it is the row before
            last_count = count
            bar.show(f"{number.name} {redop} {size}")
            result = self._one(job, send, receive)
            with bar.hidden():
                self._report(job, result)
            if result.stop:
                self.interrupted = True
                return

    def _buffers(self, number: Number, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two buffers of the largest size, or the same refusal on every rank."""
        count = self.row.count(size, number.size, self.backend.world_size)
        failed, buffers = "", []
        try:
            buffers = [self.backend.buffer(count, number) for _ in range(2)]
        except (RuntimeError, MemoryError, Unsupported) as error:
            failed = str(error).partition("\n")[0]
        for rank, text in enumerate(self.backend.gather_text(failed)):
            if text:
                self._refuse(
                    UsageError(f"-e {size}: rank {rank} cannot allocate two buffers: {text}")
                )
        return buffers[0], buffers[1]

    def _check_memory(self, need: int, size: int) -> None:
        local = [sum(h.host == other.host for other in self._hellos) for h in self._hellos]
        shared = self.backend.device.type == "cpu"
        rooms = [h.free // (n if shared else 1) for h, n in zip(self._hellos, local, strict=True)]
        rank = min(range(len(rooms)), key=rooms.__getitem__)
        if need > rooms[rank]:
            most = max(0, rooms[rank] - _ROOM) // 2
            self._refuse(
                UsageError(
                    f"-e {size}: two buffers need {need >> 20} MiB a rank; rank {rank} "
                    f"({self._hellos[rank].hostname}) has {rooms[rank] >> 20} MiB: "
                    f"give -e {most >> 20}M or less"
                )
            )

    def _one(self, job: Job, send: torch.Tensor, receive: torch.Tensor) -> Result:
        self.watch.allow(self.arguments.timeout or self._patience(job.size))
        began = time.monotonic()
        result = measure(
            self.backend,
            job,
            send,
            receive,
            seed=len(self.results) * 2 * max(1, job.checks),
            stop=lambda: self.watch.interrupted,
            phase=lambda name: self.watch.phase(f"size {job.size}: {name}"),
        )
        self._last_time, self._last_bytes = time.monotonic() - began, max(1, job.size)
        self.results.append(result)
        return result

    def _patience(self, size: int) -> float:
        """Ten times what the size before suggests, and never less than two minutes."""
        if not self._last_bytes:
            return 300.0
        return 120.0 + 10 * self._last_time * max(1.0, size / self._last_bytes)

    # -- reporting, on rank 0

    def _say(self, lines: Sequence[str]) -> None:
        if self.leader and lines:
            try:
                self._out.write("\n".join(lines) + "\n")
                self._out.flush()
            except BrokenPipeError:
                self._nobody_reads(self._out)

    def _nobody_reads(self, stream: TextIO) -> None:
        """As `| head` does it.  The other ranks must not be left in the middle of a size."""
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), stream.fileno())  # later writes, and the flush at exit
        if self.arguments.json in ("", "-"):
            self.watch.interrupted = True

    def _report(self, job: Job, result: Result) -> None:
        line = table.result_line(result, job.number.name, job.redop)
        self._say([line, *table.first_wrong_lines(result)])
        if self._writer is None:
            return
        try:
            for placement in (result.out_of_place, result.in_place):
                self._writer.write(self._record(job, result, placement))
        except BrokenPipeError:
            self._nobody_reads(sys.stdout)
        except OSError as error:
            raise CommkitError(
                f"--json {self.arguments.json}: {error.strerror}; "
                f"{len(self.results) - 1} sizes were kept"
            ) from error

    def _record(self, job: Job, result: Result, placement: Placement) -> records.Measurement:
        us, summary = 1e6, placement.summary  # three decimals: nanoseconds
        return records.Measurement(
            collective=self.row.name,
            dtype=job.number.name,
            redop=job.redop if self.row.reduces else "none",
            root=-1,
            in_place=placement.in_place,
            bytes=result.bytes,
            count=result.count,
            world_size=self.backend.world_size,
            hosts=self._hosts(),
            backend=self.backend.name,
            device=self._hellos[0].device,
            start="torch" if self.arguments.stock else "commkit",
            iterations=job.iterations,
            warmup_iterations=job.warmup,
            clock=self.backend.clock,
            times_us=tuple(round(value * us, 3) for value in placement.times),
            time_us=round(summary.p50 * us, 3),
            min_us=round(summary.minimum * us, 3),
            mean_us=round(summary.mean * us, 3),
            p95_us=round(summary.p95 * us, 3),
            p99_us=round(summary.p99 * us, 3),
            max_us=round(summary.maximum * us, 3),
            cv=summary.cv,
            slowest_rank=placement.slowest_rank,
            slowest_rank_time_us=round(placement.slowest_time * us, 3),
            algbw_gbps=placement.algbw,
            busbw_gbps=placement.busbw,
            wrong=placement.wrong,
            first_wrong=placement.first_wrong,
            run=self._run,
            timestamp=time.time(),
            versions=self._hellos[0].versions,
            environment=self._hellos[0].environment,
        )

    def _slowest(self) -> list[str]:
        """One rank that is last all the time is a finding; ranks that take turns are noise."""
        if self.backend.world_size == 1 or not self.results:
            return []
        counts = collections.Counter(result.in_place.slowest_rank for result in self.results)
        rank, times = counts.most_common(1)[0]
        host = self._hellos[rank].hostname
        return [f"# slowest rank in place: {rank} ({host}) in {times} of {len(self.results)} rows"]

    def _verdict(self) -> int:
        wrong = any(r.out_of_place.wrong or r.in_place.wrong for r in self.results)
        short = [line for result in self.results for line in self._below_gate(result)]
        self._say(short)
        if wrong:
            return EXIT_WRONG_DATA
        if self.interrupted:
            return EXIT_INTERRUPTED
        return EXIT_THRESHOLD if short else EXIT_OK

    def _below_gate(self, result: Result) -> list[str]:
        """In place only: out of place includes a copy that the collective does not need."""
        gates = [gate for gate in self.arguments.gates if gate.size <= result.bytes]
        busbw = result.in_place.busbw
        if not gates or not result.bytes or busbw is None:
            return []
        gate = max(gates, key=lambda gate: gate.size)
        if busbw >= gate.busbw:
            return []
        return [f"# below --min-busbw: size {result.bytes} in place {busbw:.4g} < {gate.busbw:g}"]


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def versions(backend: Any) -> dict[str, str]:
    found = {
        "commkit": VERSION,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }
    if backend.device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        nccl: Any = torch.cuda.nccl  # torch leaves it untyped
        found["nccl"] = ".".join(str(part) for part in nccl.version())
    return found
