"""The matrix of pairs: latency and bandwidth between every two ranks, in rounds of disjoint pairs.

A round's pairs are measured at the same time, so N ranks take N - 1 rounds and not N (N - 1) / 2;
that loads a network as an all-to-all does, and a pair that shares an oversubscribed link with the
others of its round shows it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from commkit import records
from commkit.bench import agreement, tournament
from commkit.bench.agreement import Hello
from commkit.bench.arguments import Arguments
from commkit.bench.outliers import common, outliers
from commkit.bench.placement import Place
from commkit.bench.recording import Recorder
from commkit.bench.teams import Team
from commkit.bench.tournament import Pair, Round
from commkit.bench.watch import Watch
from commkit.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_WRONG_DATA, UsageError
from commkit.measure.backend import Backend
from commkit.measure.collectives import EXCHANGE, PING_PONG, Collective
from commkit.measure.engine import Half, Job, Result, placement, unpack
from commkit.measure.operation import Operation
from commkit.measure.verify import verify

#: Bytes of a message that measures latency.
SMALL = 8
#: More ranks than this do not fit a terminal as a matrix.
_SHOWN = 24
#: Bandwidths as letters: the share of the fastest pair, in eighths.
_SHADES = " .:-=+*#@"

WHICH = ("all", "ring", "bisection", "rail", "hosts")


@dataclass(frozen=True, slots=True)
class _Found:
    """Of one pair; seconds of one message, and 1e9 bytes a second one way."""

    latency: float
    bandwidth: float
    wrong: int


def chosen(which: str, hellos: Sequence[Hello]) -> tuple[Round, ...]:
    """The rounds.  Raises UsageError where there are no two ranks, or hosts, to pair."""
    hosts: dict[str, list[int]] = {}
    for rank, hello in enumerate(hellos):
        hosts.setdefault(hello.host, []).append(rank)
    n = len(hellos)
    if which == "hosts":
        first = [ranks[0] for ranks in hosts.values()]
        rounds = tuple(
            tuple((first[a], first[b]) for a, b in some)
            for some in tournament.everybody(len(first))
        )
    elif which == "rail":
        rounds = tournament.rails(list(hosts.values()))
    elif which == "ring":
        rounds = tournament.ring(n)
    elif which == "bisection":
        rounds = tournament.bisection(n)
    else:
        rounds = tournament.everybody(n)
    if not rounds:
        what = "two hosts" if which in ("hosts", "rail") else "two ranks"
        raise UsageError(f"pairs --{which}: expected at least {what}, found one")
    return rounds


class Pairs:
    """`run` returns the exit code, the same on every rank.  `backend` is the world's."""

    def __init__(
        self, arguments: Arguments, which: str, place: Place, backend: Backend, watch: Watch
    ) -> None:
        self.arguments = arguments
        self.which = which
        self.place = place
        self.backend = backend
        self.watch = watch
        self.leader = backend.rank == 0
        self.found: dict[Pair, _Found] = {}
        self._writer: records.Writer | None = None
        self._out: TextIO | None = None
        self._ops: dict[str, Any] = {}

    def run(self) -> int:
        self._out = sys.stderr if self.arguments.json == "-" else sys.stdout
        hellos = self._agree()
        try:
            rounds = chosen(self.which, hellos)
        except UsageError as error:
            agreement.refuse(self.backend, error)
        backend, size = self.backend, self.arguments.maximum
        recorder = Recorder(
            hellos,
            backend.name,
            backend.clock,
            "torch" if self.arguments.stock else "commkit",
            self.arguments.link,
            Recorder.identifier(),
        )
        self._say(self._header(hellos, rounds))
        number = self.arguments.numbers[0]
        send, receive = (backend.buffer(size // number.size, number) for _ in range(2))
        self.watch.deferring = True
        interrupted = False
        for at, pairs in enumerate(rounds):
            self.watch.allow(self.arguments.timeout or 120.0)
            mine = next((pair for pair in pairs if backend.rank in pair), None)
            outcomes = []
            for row, length in ((PING_PONG, SMALL), (EXCHANGE, size)):
                job = Job(
                    row,
                    number,
                    "none",
                    length,
                    self.arguments.iterations,
                    self.arguments.warmup,
                    self.arguments.checks,
                )
                half = self._measure(at, job, mine, send, receive)
                self.watch.phase(f"round {at + 1} of {len(rounds)}: gathering results")
                rows = backend.gather([float(self.watch.interrupted), *half.pack()])
                interrupted = interrupted or any(row_[0] for row_ in rows)
                outcomes.append((job, [unpack(row_[1:]) for row_ in rows]))
            for pair in pairs:
                self._keep(recorder, pair, outcomes)
            if interrupted:
                self._say([f"# interrupted after {at + 1} of {len(rounds)} rounds"])
                break
        if self._writer is not None:
            self._writer.close()
        self._say(self._report(hellos))
        if any(one.wrong for one in self.found.values()):
            return EXIT_WRONG_DATA
        return EXIT_INTERRUPTED if interrupted else EXIT_OK

    def _agree(self) -> list[Hello]:
        self._writer, trouble = agreement.open_records(self.backend, self.arguments.json)
        a = self.arguments
        plan = f"{self.which} {a.maximum} {a.iterations} {a.warmup} {a.checks} {a.numbers}"
        mine = agreement.hello(self.place, self.backend, plan, trouble)
        return agreement.exchange(self.backend, mine)

    def _operation(self, row: Collective, length: int, other: int, send: Any, receive: Any) -> Any:
        element = send.element_size()
        shape = row.shape(length, element, 2)
        op = Operation(
            row,
            shape,
            send[: shape.send],
            receive[: shape.receive],
            "none",
            self.backend.rank,
            self.backend.world_size,
            other,
            False,
        )
        op.partner = (other, other)
        return op

    def _measure(self, at: int, job: Job, mine: Pair | None, send: Any, receive: Any) -> Half:
        backend = self.backend
        what = f"round {at + 1}: {job.row.name} of {job.size} bytes"
        if mine is None:
            self.watch.phase(f"{what}: resting")
            backend.barrier()
            return Half([math.nan] * job.iterations, None)
        other = mine[0] if mine[1] == backend.rank else mine[1]
        self.watch.phase(f"{what} with rank {other}")
        op = self._operation(job.row, job.size, other, send, receive)
        call = backend.caller(op, "blocking", 1)
        for _ in range(job.warmup):
            call()
        backend.synchronize()
        backend.barrier()
        times = backend.time(call, job.iterations)
        if job.row is PING_PONG:
            times = [seconds / 2 for seconds in times]
        check = None
        if job.checks and backend.verifies:
            check = verify(backend, op, job.number, None, at)
        return Half(times, check)

    def _keep(
        self, recorder: Recorder, pair: Pair, outcomes: Sequence[tuple[Job, list[Half]]]
    ) -> None:
        medians, wrong = [], 0
        for job, halves in outcomes:
            nobody = Half([math.nan] * len(halves[0].times), None)
            of_pair = [half if rank in pair else nobody for rank, half in enumerate(halves)]
            size = job.row.shape(job.size, job.number.size, 2).total * job.number.size
            place = placement(of_pair, False, size, 1.0)
            medians.append(place.summary.p50)
            wrong += place.wrong or 0
            team = Team("", None, 2, (pair,))
            result = Result(size // job.number.size, size, place, place, False)
            record = recorder.record(team, job, result, place)
            record = replace(record, source=pair[0], peer=pair[1], rank_times_us=())
            if self._writer is not None:
                self._writer.write(record)
        size = outcomes[1][0].size
        self.found[pair] = _Found(medians[0], size / medians[1] / 1e9, wrong)

    # -- reporting, on rank 0

    def _say(self, lines: Sequence[str]) -> None:
        if self.leader and self._out is not None:
            try:
                self._out.write("\n".join(lines) + "\n")
                self._out.flush()
            except BrokenPipeError:
                with open(os.devnull, "w") as nothing:
                    os.dup2(nothing.fileno(), self._out.fileno())

    def _header(self, hellos: Sequence[Hello], rounds: Sequence[Round]) -> list[str]:
        hosts = len({hello.host for hello in hellos})
        pairs = sum(len(some) for some in rounds)
        lines = [
            f"# pairs ({self.which}): {len(hellos)} ranks on {hosts} hosts, {pairs} pairs in "
            f"{len(rounds)} rounds, backend {self.backend.name}",
            f"# latency: half of a round trip of {SMALL} bytes; bandwidth: "
            f"{self.arguments.maximum} bytes both ways at once, GB/s one way",
        ]
        if hosts == 1:
            lines.append("# loopback: all ranks are on one host, no network is measured")
        return lines + agreement.differences(hellos)

    def _report(self, hellos: Sequence[Hello]) -> list[str]:
        latency = {pair: one.latency * 1e6 for pair, one in self.found.items()}
        bandwidth = {pair: one.bandwidth for pair, one in self.found.items()}
        lines = []
        members = sorted({rank for pair in self.found for rank in pair})
        for title, values in (("latency in us", latency), ("bandwidth in GB/s", bandwidth)):
            ordered = sorted(values.values())
            lines.append(
                f"# {title}: lowest {ordered[0]:.4g}, median {ordered[len(ordered) // 2]:.4g}, "
                f"highest {ordered[-1]:.4g}"
            )
            if len(members) <= _SHOWN:
                lines += _matrix(members, values)
        if len(members) > _SHOWN:
            lines += _heat(members, bandwidth)
        lines += self._outliers("slow", bandwidth, hellos, True, "GB/s")
        lines += self._outliers("late", latency, hellos, False, "us")
        for pair, one in self.found.items():
            if one.wrong:
                lines.append(f"# wrong data: ranks {pair[0]} and {pair[1]}: {one.wrong} elements")
        return lines

    def _outliers(
        self,
        word: str,
        values: dict[Pair, float],
        hellos: Sequence[Hello],
        low_is_bad: bool,
        unit: str,
    ) -> list[str]:
        found = outliers(values, low_is_bad=low_is_bad)
        lines = []
        for member, bad, pairs in common(found, values):
            lines.append(
                f"# {word}: rank {member} ({hellos[member].hostname}) in {bad} of {pairs} pairs"
            )
        for one in found[:10]:
            a, b = one.pair
            lines.append(
                f"# {word}: ranks {a} ({hellos[a].hostname}) and {b} ({hellos[b].hostname}): "
                f"{one.value:.4g} {unit}, median {one.median:.4g}"
            )
        if len(found) > 10:
            lines.append(f"# ... and {len(found) - 10} more pairs that are {word}")
        return lines


def _value(values: dict[Pair, float], a: int, b: int) -> float | None:
    return values.get((min(a, b), max(a, b)))


def _matrix(members: Sequence[int], values: dict[Pair, float]) -> list[str]:
    lines = ["rank   " + "".join(f"{rank:>9d}" for rank in members)]
    for a in members:
        cells = []
        for b in members:
            value = _value(values, a, b)
            cells.append(f"{'-' if value is None else format(value, '.4g'):>9}")
        lines.append(f"{a:<7d}" + "".join(cells))
    return lines


def _heat(members: Sequence[int], values: dict[Pair, float]) -> list[str]:
    """A character a pair: the darker the faster, blank where nothing was measured."""
    top = max(values.values())
    lines = [f"# heat map: one character a pair of ranks, {_SHADES[-1]} is {top:.4g}"]
    for a in members:
        row = ""
        for b in members:
            value = _value(values, a, b)
            shade = 0 if value is None else 1 + int(7.999 * value / top)
            row += _SHADES[min(shade, len(_SHADES) - 1)]
        lines.append(f"{a:<7d}{row.rstrip()}")
    return lines
