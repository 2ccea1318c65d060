"""One world's start-up, timed and counted: real ranks on simulated hosts of eight.

What a rank does between the word and its report is a Start: it returns seconds of the monotonic
clock under `marks`, in the order of what it did.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _ranks
import torch.distributed as dist
from _counting import Operations

from commkit import _C, api, patch

A_HOST = 8
HOW = "real ranks on simulated hosts of 8, loopback"


@dataclass(frozen=True)
class Way:
    """How a world starts: what it is, variables, under commkit's patch, by commkit's own init."""

    meaning: str
    variables: dict[str, str] = field(default_factory=dict)
    patched: bool = False
    native: bool = False


#: What a rank does once its default group exists.
Then = Callable[[], dict[str, float]]


def environments(ranks: int, way: Way, port: int, job: str) -> list[dict[str, str]]:
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank % A_HOST),
            "LOCAL_WORLD_SIZE": str(min(A_HOST, ranks - rank // A_HOST * A_HOST)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "COMMKIT_HOST_ID": f"host{rank // A_HOST}",
            "COMMKIT_JOB_ID": job,
            **way.variables,
        }
        for rank in range(ranks)
    ]


def _starter(
    way: Way, backend: str, then: Then, counting: bool
) -> Callable[[], Callable[[], dict[str, Any]]]:
    """What a rank does before the word, and after it."""

    def ready() -> Callable[[], dict[str, Any]]:
        operations = Operations()
        if counting:
            operations.install()
        if way.patched:
            patch.install()
        init = api.init_process_group if way.native else dist.init_process_group

        def start() -> dict[str, Any]:
            used = _processor_seconds()
            began = time.monotonic()
            init(backend)
            marks = {"began": began, "init": time.monotonic(), **then()}
            report: dict[str, Any] = {
                "marks": marks,
                "operations": operations.count,
                "messages": operations.messages,
                "processor": _processor_seconds() - used,
            }
            if world := api.world():
                report["phases"] = api.start_up_phases()
                if world.identity.local_rank == 0:
                    report["processor"] += _agent_seconds(world.identity.agent_pid)
            if counting:
                report["mib"] = _own_mib()
            assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
            return report

        return start

    return ready


def _own_mib() -> float:
    """Memory that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def _processor_seconds() -> float:
    """Of this process and of children that it has waited for (an agent's first steps)."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


def _agent_seconds(pid: int) -> float:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) * 1e-9
    return 0.0


def _finish() -> None:
    if api.world() is not None:
        api.destroy_process_group()


@contextlib.contextmanager
def _quiet_after() -> Iterator[None]:
    """The agents of a cycle are gone before the next one begins."""
    before = _ranks.agents_here()
    yield
    deadline = time.monotonic() + 10
    while _ranks.agents_here() - before and time.monotonic() < deadline:
        time.sleep(0.005)


_cycles = iter(range(1 << 20))


def cycle(
    ranks: int, way: Way, backend: str, then: Then = dict, counting: bool = False
) -> dict[str, Any]:
    """One world's start-up.  `marks`: seconds until the last rank had come so far."""
    number = next(_cycles)
    port = _ranks.free_port(number + os.getpid())
    rows = environments(ranks, way, port, f"start-up-{os.getpid()}-{number}")
    before = _ranks.tcp_counters()
    agents: list[dict[str, str]] = []
    with _quiet_after():
        reports = _ranks.world(
            rows,
            _starter(way, backend, then, counting),
            _finish,
            900,
            lambda: agents.extend(_C.agents() if counting else ()),
        )
    after = _ranks.tcp_counters()
    began = min(r["marks"]["began"] for r in reports)
    marks = {
        name: max(r["marks"][name] for r in reports) - began
        for name in reports[0]["marks"]
        if name != "began"
    }
    ends = [list(r["marks"].values())[-1] - r["marks"]["began"] for r in reports]
    took: dict[str, Any] = {
        "marks": marks,
        "seconds": list(marks.values())[-1],
        "rank_seconds": statistics.median(ends),
        "processor_seconds": sum(r["processor"] for r in reports),
        "phases": {},
    }
    if counting:
        took["store_operations"] = sum(r["operations"] for r in reports)
        took["own_mib"] = statistics.median(r["mib"] for r in reports)
        if agents:
            took["busiest"] = max(int(agent.get("operations", "0")) for agent in agents)
            took["busiest_messages"] = max(int(agent.get("messages", "0")) for agent in agents)
        else:
            took["busiest"] = sum(r["messages"] for r in reports)
    if _ranks.isolated():
        took["connections"] = after["ActiveOpens"] - before["ActiveOpens"]
        took["segments"] = after["OutSegs"] - before["OutSegs"]
    if "phases" in reports[0]:
        names = reports[0]["phases"]
        took["phases"] = {
            name: statistics.median(r["phases"][name] for r in reports) for name in names
        }
    return took


def in_turns(
    ranks: int, backend: str, ways: dict[str, Way], then: dict[str, Then], repeats: dict[str, int]
) -> dict[str, dict[str, Any]]:
    """Every way so many times, in turns, and once more to count; way -> medians."""
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(max(repeats.values())):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if number < repeats[name]:
                taken[name].append(cycle(ranks, ways[name], backend, then[name]))
    rows: dict[str, dict[str, Any]] = {}
    for name, cycles in taken.items():
        counted = cycle(ranks, ways[name], backend, then[name], counting=True)
        seconds = [one["seconds"] for one in cycles]
        row: dict[str, Any] = {"way": name, "backend": backend, "ranks": ranks}
        row["repeats"] = len(cycles)
        for key in ("seconds", "rank_seconds", "processor_seconds"):
            row[key] = round(statistics.median(one[key] for one in cycles), 6)
        row["lowest"], row["highest"] = round(min(seconds), 6), round(max(seconds), 6)
        row["operations_a_rank"] = round(counted["store_operations"] / ranks, 3)
        for key in ("busiest", "busiest_messages", "own_mib"):
            row[key] = counted.get(key)
        for key in ("connections", "segments"):
            counts = [one[key] for one in cycles if key in one]
            row[f"{key}_a_rank"] = round(statistics.median(counts) / ranks, 3) if counts else None
        for key in ("marks", "phases"):
            row[key] = {
                part: round(statistics.median(one[key][part] for one in cycles), 6)
                for part in cycles[0][key]
            }
        marks = list(cycles[0]["marks"])
        # What comes after the init of the slowest rank; median of differences.
        row["after_init"] = round(
            statistics.median(one["marks"][marks[-1]] - one["marks"]["init"] for one in cycles), 6
        )
        rows[name] = row
    return rows
