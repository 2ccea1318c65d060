"""From a result to its record."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from commkit import records
from commkit.bench.agreement import Hello
from commkit.bench.teams import Team
from commkit.measure.collectives import crossing_bytes
from commkit.measure.engine import Job, Placement, Result


@dataclass(frozen=True, slots=True)
class Recorder:
    """What all records of a run have in common."""

    hellos: Sequence[Hello]
    backend: str
    clock: str
    start: str  # who made the process group
    link: float | None
    run: str

    @staticmethod
    def identifier() -> str:
        return uuid.uuid4().hex

    def record(
        self, team: Team, job: Job, result: Result, placement: Placement, concurrent: str = ""
    ) -> records.Measurement:
        us, summary = 1e6, placement.summary  # three decimals: nanoseconds
        busbw = placement.busbw
        return records.Measurement(
            collective=job.row.name,
            dtype=job.number.name,
            redop=job.redop if job.row.reduces else "none",
            root=result.root,
            in_place=placement.in_place,
            bytes=result.bytes,
            count=result.count,
            world_size=team.size,
            hosts=len(set(team.hosts(self.hellos))),
            backend=self.backend,
            device=self.hellos[0].device,
            start=self.start,
            iterations=len(placement.times),
            warmup_iterations=job.warmup,
            clock=self.clock,
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
            busbw_gbps=busbw,
            wrong=placement.wrong,
            first_wrong=placement.first_wrong,
            run=self.run,
            timestamp=time.time(),
            versions=self.hellos[0].versions,
            environment=self.hellos[0].environment,
            mode=job.mode,
            aggregated=job.aggregated,
            group=team.label,
            groups=len(team.groups),
            concurrent=concurrent,
            rank_times_us=tuple(round(value * us, 3) for value in placement.rank_times),
            skew=placement.skew,
            precision=placement.precision,
            inter_host_gbps=self.inter_host(team, job, result, placement),
            link_percent=None if self.link is None or busbw is None else 100 * busbw / self.link,
        )

    def inter_host(
        self, team: Team, job: Job, result: Result, placement: Placement
    ) -> float | None:
        """The busiest rank's bytes to or from other hosts over the time, in 1e9 bytes a second.

        None where that depends on the library's algorithm.
        """
        hosts = team.hosts(self.hellos)
        ranks = range(len(hosts)) if job.row.name != "all_gather" else range(1)
        amounts = [crossing_bytes(job.row, rank, hosts, result.bytes) for rank in ranks]
        known = [amount for amount in amounts if amount is not None]
        seconds = placement.summary.p50
        return max(known) / seconds / 1e9 if known and seconds > 0 else None
