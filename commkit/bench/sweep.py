"""The sweep of one rank: agree, measure size by size, report from rank 0."""

from __future__ import annotations

import collections
import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn, TextIO

import torch

from commkit import records
from commkit.bench import agreement, baseline, dryrun, table, teams
from commkit.bench.agreement import Hello
from commkit.bench.arguments import Arguments
from commkit.bench.formats import table as record_table
from commkit.bench.placement import Place
from commkit.bench.progress import Bar
from commkit.bench.recording import Recorder
from commkit.bench.teams import Team
from commkit.bench.watch import Watch
from commkit.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_THRESHOLD,
    EXIT_WRONG_DATA,
    CommkitError,
    UsageError,
)
from commkit.measure.backend import Backend, Unsupported
from commkit.measure.collectives import Collective
from commkit.measure.engine import Job, Result, buffer_counts, measure
from commkit.measure.numbers import Number
from commkit.measure.together import measure_together
from commkit.version import VERSION

#: Verification works in pieces; this covers its temporaries besides the buffers.
_ROOM = 64 << 20
#: (label, its groups) -> this rank's group as a back end, None for a rank that is in none
MakeGroup = Callable[[str, tuple[tuple[int, ...], ...]], Backend | None]


class Sweep:
    """`run` returns the exit code, the same on every rank."""

    def __init__(
        self,
        arguments: Arguments,
        place: Place | None,
        backend: Backend,
        watch: Watch,
        make_group: MakeGroup,
        measured: Backend | None = None,
        *,
        stock: bool = False,
    ) -> None:
        """`measured` is the world's back end where `backend` only carries the ranks' talk."""
        self.arguments = replace(arguments, stock=arguments.stock or stock)
        self.place = place
        self.backend = backend
        self.measured = measured or backend
        self.watch = watch
        self.leader = backend.rank == 0
        self.results: list[Result] = []
        self.records: list[records.Measurement] = []
        self.interrupted = False
        self.short: list[str] = []  # what is below a gate
        self._make_group = make_group
        self._writer: records.Writer | None = None
        self._out: TextIO = sys.stderr if arguments.json == "-" else sys.stdout
        self._hellos: list[Hello] = []
        self._header_lines: list[str] = []
        self._last_time, self._last_bytes = 0.0, 0

    def print_to(self, stream: TextIO) -> None:
        self._out = stream

    def first_wrong(self) -> str:
        for record in self.records:
            wrong = record.first_wrong
            if wrong is not None:
                where = "in place" if record.in_place else "out of place"
                return (
                    f"{record.collective} of {record.bytes} bytes {where}: {record.wrong} wrong "
                    f"elements, first: rank {wrong.rank} index {wrong.index} got {wrong.got} "
                    f"expected {wrong.expected:.17g}"
                )
        return "no wrong element"

    def run(self, start_up: float, phases: dict[str, float]) -> int:
        self._hellos = self._agree()
        self._recorder = Recorder(
            self._hellos,
            self.measured.name,
            self.measured.clock,
            self._starter(),
            self.arguments.link,
            Recorder.identifier(),
        )
        sizes = self.arguments.sizes()
        made = self._teams()
        self._check_memory(sizes[-1], made)
        self._header_lines = self._header(start_up, phases, made)
        self.watch.deferring = True
        try:
            if self.arguments.concurrent:
                self._all_at_once(made, sizes)
            else:
                for row in self.arguments.rows:
                    if not self.interrupted:
                        self._one_row(made[0], row, sizes)
        finally:
            if self._writer is not None:
                self._writer.close()
        if self.interrupted:
            self._say([f"# interrupted after {_many(len(self.results), 'size')}"])
        return self._verdict()

    # -- before the first size

    def _agree(self) -> list[Hello]:
        """Everything that could differ between ranks, compared at once."""
        self._writer, trouble = agreement.open_records(self.backend, self.arguments.json)
        plan = hashlib.sha256(repr(self._shared_plan()).encode()).hexdigest()
        mine = agreement.hello(self.place, self.measured, plan, trouble)
        return agreement.exchange(self.backend, mine)

    def _shared_plan(self) -> tuple[object, ...]:
        # Only rank 0 knows the files, so their names may differ.
        a = replace(
            self.arguments,
            json="",
            baseline="given" if self.arguments.baseline else "",  # all come to its gather
            rows=(),
            concurrent=(),
            gates=(),
            timeout=None,
        )
        names = [row.name for row in self.arguments.rows]
        families = [(family, row.name) for family, row in self.arguments.concurrent]
        return (names, families, repr(a))

    def _refuse(self, error: CommkitError) -> NoReturn:
        agreement.refuse(self.backend, error)

    def _starter(self) -> str:
        if self.measured.name in ("mpi", "fake"):
            return self.measured.name
        return "torch" if self.arguments.stock else "commkit"

    def _teams(self) -> list[Team]:
        """The families of groups to measure in, made by all ranks."""
        a, n = self.arguments, self.backend.world_size
        wanted: dict[str, tuple[tuple[int, ...], ...]] = {}
        try:
            if a.groups:
                wanted[a.groups] = teams.split(a.groups, self._hellos)
            for name in [a.group] if a.group else [family for family, _ in a.concurrent]:
                wanted[name] = teams.family(a.layout, name, n)
            if not wanted:
                made = [teams.world(self.measured)]
            else:
                self.watch.phase("making groups")
                made = [
                    Team(label, self._make_group(label, groups), len(groups[0]), groups)
                    for label, groups in wanted.items()
                ]
        except (UsageError, Unsupported) as error:
            self._refuse(error)
        for team in made:
            if a.root >= team.size and any(row.rooted for row in a.rows):
                self._refuse(UsageError(f"-r {a.root}: expected a rank below {team.size}"))
        return made

    def _hosts(self) -> int:
        return len({hello.host for hello in self._hellos})

    def _header(self, start_up: float, phases: dict[str, float], made: Sequence[Team]) -> list[str]:
        backend, hosts = self.measured, self._hosts()
        world = f"{_many(backend.world_size, 'rank')} on {_many(hosts, 'host')}"
        starters = {"torch": "torch.distributed", "mpi": "MPI", "fake": "torch's fake group"}
        starter = starters.get(self._starter(), "commkit")
        parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases.items())
        lines = [
            f"# commkit {VERSION}, torch {torch.__version__}, backend {backend.name}, "
            f"device {backend.device.type}, {world}",
            f"# process group started by {starter} in {start_up:.3f} s"
            + (f" ({parts})" if parts else ""),
        ]
        if not backend.verifies:
            lines.append("# simulated: one process, peers are only counted, no data are moved")
        elif hosts == 1 and backend.world_size > 1:
            lines.append("# loopback: all ranks are on one host, no network is measured")
        if backend.world_size == 1:
            lines.append("# single rank: bus bandwidth is not defined")
        for team in made:
            if team.label:
                lines.append(
                    f"# {team.label}: {_many(len(team.groups), 'group')} of "
                    f"{_many(team.size, 'rank')} at the same time, "
                    f"first: {' '.join(map(str, team.groups[0][:16]))}"
                    + (" ..." if team.size > 16 else "")
                )
        lines += agreement.differences(self._hellos)
        lines += table.device_lines([(h.hostname, h.pid, h.place()) for h in self._hellos])
        lines.append(f"# time: median over iterations of the slowest rank ({backend.clock} clock)")
        if self.arguments.mode != "blocking":
            lines.append(f"# calls: {self._how()}")
        return lines

    def _how(self) -> str:
        a = self.arguments
        if a.mode == "async":
            return "asynchronous, each is waited for"
        if a.mode == "graph":
            return f"{a.aggregated} in a graph that is replayed; times are of one call"
        by = "coalesced" if "nccl" in self.measured.name else "in flight together"
        return f"{a.aggregated} {by}; times are of one call"

    def _supported(self, team: Team, row: Collective) -> list[tuple[Number, str]]:
        """The pairs to sweep; says which ones the back end does not have."""
        pairs, refusals = [], []
        seen: set[str] = set()
        for number in self.arguments.numbers:
            for redop in self.arguments.redops if row.reduces else ("none",):
                if not row.moves and seen:
                    continue
                seen.add(redop)
                self.watch.phase(f"trying {row.name} {number.name} {redop}")
                mine = "" if team.backend is None else team.backend.supports(number, redop, row)
                # Of all: a rank without a partner refuses nothing.
                answers = self.backend.gather_text(mine)
                refusal = next((text for text in answers if text), "")
                if refusal:
                    refusals.append(f"{number.name} {redop} ({self.measured.name}: {refusal})")
                else:
                    pairs.append((number, redop))
        if not pairs and len(self.arguments.rows) == 1:
            self._refuse(UsageError(f"{row.name} is not supported for {'; '.join(refusals)}"))
        # Only now: a run that measures nothing says so in one line.
        header, self._header_lines = self._header_lines, []
        self._say(header + [f"# not supported: {row.name} {text}" for text in refusals])
        return pairs

    # -- one collective

    def _one_row(self, team: Team, row: Collective, sizes: Sequence[int]) -> None:
        pairs = self._supported(team, row)
        if not row.moves:
            sizes = (0,)
        self._say(table.plan_lines(self.arguments, row))
        if row.note and self.measured.name not in ("mpi", "cupy-nccl"):
            self._say([f"# {row.note}"])
        self._say(self._labels())
        first = len(self.results)
        bar = Bar(len(sizes) * len(pairs), self.leader)
        try:
            for number, redop in pairs:
                if not self.interrupted:
                    self._sweep(team, row, number, redop, sizes, bar)
        finally:
            bar.close()
        mine = self.results[first:]
        self._say(self._slowest(mine) + table.footer_lines(mine, row))

    def _job(self, row: Collective, number: Number, redop: str, size: int) -> Job:
        a = self.arguments
        return Job(
            row,
            number,
            redop,
            size,
            a.iterations,
            a.warmup,
            a.checks,
            a.root,
            a.mode,
            a.aggregated,
            a.budget,
            a.precision,
        )

    def _sweep(
        self,
        team: Team,
        row: Collective,
        number: Number,
        redop: str,
        sizes: Sequence[int],
        bar: Bar,
    ) -> None:
        buffers = self._buffers(row, number, sizes[-1], team.size)
        last_count = -1
        for size in sizes:
            count = row.shape(size, number.size, team.size).part
            bar.advance()
            if count == last_count:
                continue  # rounded to whole elements it is the row before
            last_count = count
            bar.show(f"{row.name} {number.name} {redop} {size}")
            job = self._job(row, number, redop, size)
            result = self._one(team, job, buffers)
            with bar.hidden():
                self._report(team, job, result)
            if result.stop:
                self.interrupted = True
                return

    # -- several families at once, as a training step has them

    def _all_at_once(self, made: Sequence[Team], sizes: Sequence[int]) -> None:
        """Each family alone, then all of them together, size by size."""
        rows = [row for _, row in self.arguments.concurrent]
        label = "+".join(f"{family}:{row.name}" for family, row in self.arguments.concurrent)
        number = self.arguments.numbers[0]
        redop = self.arguments.redops[0]
        parts = list(zip(made, rows, strict=True))
        for team, row in parts:
            self._supported(team, row)
        buffers = [self._buffers(row, number, sizes[-1], team.size) for team, row in parts]
        self._say(table.plan_lines(self.arguments, rows[0]))
        self._say([f"# concurrent: {label}; rows: each family alone, then all together, where the"])
        self._say(["# time is until the last one is done", *self._labels()])
        for size in sizes:
            jobs = [self._job(row, number, redop, size) for row in rows]
            alone = []
            for (team, _), job, pair in zip(parts, jobs, buffers, strict=True):
                result = self._one(team, job, pair)
                alone.append(result)
                self._report(team, job, result, f"{team.label} alone")
            self.watch.allow(self.arguments.timeout or self._patience(size))
            results = measure_together(
                self.backend,
                [(team.backend, team.size) for team in made],
                jobs,
                buffers,
                seed=self._seed(),
                stop=lambda: self.watch.interrupted,
                phase=functools.partial(self._phase_together, size),
            )
            for team, job, result in zip(made, jobs, results, strict=True):
                self.results.append(result)
                self._report(team, job, result, f"{team.label} together", label)
            times = [result.in_place.summary.p50 for result in alone]
            together = results[0].in_place.summary.p50
            self._say(
                [
                    f"# size {size}: together {together * 1e6:.1f} us, "
                    f"{together / max(times):.2f} of the slowest alone, "
                    f"{together / sum(times):.2f} of one after the other (in place)"
                ]
            )
            if any(result.stop for result in [*alone, *results]):
                self.interrupted = True
                return

    def _phase_together(self, size: int, name: str) -> None:
        self.watch.phase(f"size {size} together: {name}")

    # -- one size

    def _buffers(
        self, row: Collective, number: Number, size: int, n: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two buffers for the largest size, or the same refusal on every rank."""
        failed, buffers = "", []
        try:
            for count in buffer_counts(row, size, number.size, n):
                buffers.append(self.measured.buffer(count, number))
        except (RuntimeError, MemoryError, Unsupported) as error:
            failed = str(error).partition("\n")[0]
        for rank, text in enumerate(self.backend.gather_text(failed)):
            if text:
                self._refuse(
                    UsageError(f"-e {size}: rank {rank} cannot allocate two buffers: {text}")
                )
        return buffers[0], buffers[1]

    def _check_memory(self, size: int, made: Sequence[Team]) -> None:
        rows = [row for _, row in self.arguments.concurrent] or self.arguments.rows
        element = max(number.size for number in self.arguments.numbers)
        needs = [
            dryrun.memory(row, size, element, team.size)
            for row in rows
            for team in made
            if row.moves
        ] or [0]
        need = (sum(needs) if self.arguments.concurrent else max(needs)) + _ROOM
        local = [sum(h.host == other.host for other in self._hellos) for h in self._hellos]
        shared = self.measured.device.type == "cpu" and self.measured.verifies
        rooms = [h.free // (n if shared else 1) for h, n in zip(self._hellos, local, strict=True)]
        rank = min(range(len(rooms)), key=rooms.__getitem__)
        if need > rooms[rank]:
            most = max(0, rooms[rank] - _ROOM) * size // max(1, need - _ROOM)
            self._refuse(
                UsageError(
                    f"-e {size}: two buffers need {need >> 20} MiB a rank; rank {rank} "
                    f"({self._hellos[rank].hostname}) has {rooms[rank] >> 20} MiB: "
                    f"give -e {most >> 20}M or less"
                )
            )

    def _seed(self) -> int:
        return len(self.results) * 2 * max(1, self.arguments.checks)

    def _one(self, team: Team, job: Job, buffers: tuple[torch.Tensor, torch.Tensor]) -> Result:
        self.watch.allow(self.arguments.timeout or self._patience(job.size))
        began = time.monotonic()
        result = measure(
            team.backend,
            job,
            buffers,
            control=self.backend,
            group_size=team.size,
            seed=self._seed(),
            stop=lambda: self.watch.interrupted,
            phase=lambda name: self.watch.phase(f"size {job.size}: {name}"),
        )
        self._last_time, self._last_bytes = time.monotonic() - began, max(1, job.size)
        self.results.append(result)
        return result

    def _patience(self, size: int) -> float:
        """Ten times what the size before suggests, and never less than two minutes."""
        asked = 4 * (self.arguments.budget or 0.0)  # two placements, and as much to spare
        if not self._last_bytes:
            return 300.0 + asked
        return 120.0 + asked + 10 * self._last_time * max(1.0, size / self._last_bytes)

    # -- reporting, on rank 0

    def _labels(self) -> list[str]:
        return record_table.label_lines(wide=True) if self.arguments.wide else table.label_lines()

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

    def _report(
        self, team: Team, job: Job, result: Result, what: str = "", concurrent: str = ""
    ) -> None:
        redop = job.redop if job.row.reduces else "none"
        pair = [
            self._recorder.record(team, job, result, placement, concurrent)
            for placement in (result.out_of_place, result.in_place)
        ]
        self.records += pair
        line = table.result_line(result, job.number.name, redop)
        if self.arguments.wide:
            line = record_table.row_line(pair[0], pair[1], wide=True)
        label = [f"# {what}: {job.row.name}"] if what else []
        self._say([*label, line, *table.first_wrong_lines(result)])
        if self._writer is None:
            return
        try:
            for record in pair:
                self._writer.write(record)
        except BrokenPipeError:
            self._nobody_reads(sys.stdout)
        except OSError as error:
            raise CommkitError(
                f"--json {self.arguments.json}: {error.strerror}; "
                f"{len(self.results) - 1} sizes were kept"
            ) from error

    def _slowest(self, results: Sequence[Result]) -> list[str]:
        """One rank that is last all the time is a finding; ranks that take turns are noise."""
        if self.backend.world_size == 1 or not results:
            return []
        counts = collections.Counter(result.in_place.slowest_rank for result in results)
        rank, times = counts.most_common(1)[0]
        host = self._hellos[rank].hostname
        return [f"# slowest rank in place: {rank} ({host}) in {times} of {len(results)} rows"]

    def _verdict(self) -> int:
        wrong = any(r.out_of_place.wrong or r.in_place.wrong for r in self.results)
        self.short = [line for result in self.results for line in self._below_gate(result)]
        self._say(self.short)
        slower = self._beside_baseline() if self.arguments.baseline else EXIT_OK
        if wrong:
            return EXIT_WRONG_DATA
        if self.interrupted:
            return EXIT_INTERRUPTED
        return slower or (EXIT_THRESHOLD if self.short else EXIT_OK)

    def _beside_baseline(self) -> int:
        """Rank 0 has the file; all ranks have its answer."""
        code, short = EXIT_OK, ""
        if self.leader:
            a = self.arguments
            lines, code, short = baseline.judge(a.baseline, a.threshold, self.records)
            self._say(lines)
        answer, _, text = self.backend.gather_text(f"{code} {short}")[0].partition(" ")
        self.short += [text] if text else []
        return int(answer)

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
