"""Several groups of one rank at once, each named and met under names that all members know.

Groups of a back end that connects are made by a few threads; others one after the other.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Store

from commkit import creation, plan
from commkit.journal import Entry, Journal
from commkit.overlay import World
from commkit.store import open_store
from commkit.stragglers import Stragglers
from commkit.trouble import explain

#: Threads that create groups of one rank, at most; each has a connection to the host's agent.
_MOST_WORKERS = 16


@dataclass(slots=True)
class Made:
    """One group that this rank has made, and the seconds that it took."""

    family: str
    ranks: tuple[int, ...]
    name: str
    backend: str
    seconds: float
    group: ProcessGroup


@dataclass(slots=True)
class Job:
    group: plan.Group
    backend: str
    timeout: timedelta
    options: Any
    device: torch.device | None

    @property
    def entry(self) -> Entry:
        return Entry(self.group.name, self.group.family, self.group.ranks)


@dataclass(slots=True)
class Joined:
    """The tree behind torch's default group."""

    world: World
    store: Store
    limit: timedelta
    journal: Journal
    stragglers: Stragglers
    connections: dict[tuple[int, timedelta], Store] = field(default_factory=dict)

    def connection(self, worker: int, timeout: timedelta) -> Store:
        """A client of torch's store waits while it holds its lock: each thread needs its own."""
        if worker == 0 and timeout == self.limit:
            return self.store
        key = (worker, timeout)
        if key not in self.connections:
            self.connections[key] = open_store(self.world, timeout.total_seconds())
        return self.connections[key]

    def met(self, group: Entry, waited: bool) -> None:
        """This rank's part of a group exists; `waited`: that of the others as well."""
        if len(group.ranks) > 1:
            self.world.connected(group.name, group.ranks)
            if not waited:
                self.stragglers.expect(group)


def create(job: Job, store: Store) -> ProcessGroup:
    return creation.create(
        job.group.name,
        job.group.ranks,
        store,
        backend=job.backend,
        timeout=job.timeout,
        options=job.options,
        desc=job.group.family or None,
        device=job.device,
    )


def made(job: Job, group: ProcessGroup, seconds: float) -> Made:
    return Made(job.group.family, job.group.ranks, job.group.name, job.backend, seconds, group)


def create_jobs(joined: Joined, jobs: Sequence[Job], share: bool) -> list[Made]:
    first: dict[Any, int] = {}
    alias = []
    for index, job in enumerate(jobs):
        key = (job.group.ranks, job.backend, job.timeout) if share and not job.options else index
        alias.append(first.setdefault(key, index))
    todo = [job for index, job in enumerate(jobs) if alias[index] == index]
    joined.journal.begin([job.entry for job in todo])
    waits = [
        len(job.group.ranks) > 1 and creation.connects(job.backend, job.device) for job in todo
    ]
    workers = min(sum(waits), _workers(joined.world)) if sum(waits) > 1 else 1
    groups: dict[int, Made] = {}
    with joined.world.creating():
        _each(
            todo,
            lambda worker, job: _create_one(joined, worker, job),
            workers,
            lambda place, made: groups.__setitem__(place, made),
        )
    places = {index: place for place, index in enumerate(sorted(set(alias)))}
    for job, waited in zip(todo, waits, strict=True):
        joined.met(job.entry, waited)
    result = []
    for index, job in enumerate(jobs):
        original = groups[places[alias[index]]]
        if alias[index] == index:
            result.append(original)
        else:
            result.append(made(job, original.group, 0.0))
    return result


def _create_one(joined: Joined, worker: int, job: Job) -> Made:
    began = time.monotonic()
    try:
        store = creation.store_for(job.group.ranks, joined.connection(worker, job.timeout))
        return made(job, create(job, store), time.monotonic() - began)
    except Exception as error:
        explained = explain(
            joined.world,
            error,
            f"group {job.entry.shown()} ({job.backend})",
            began + job.timeout.total_seconds(),
            lambda: joined.journal.missing(job.entry),
        )
        if explained is None:
            raise
        raise explained from error


def _workers(world: World) -> int:
    cores = len(os.sched_getaffinity(0)) // world.identity.local_world_size
    return min(max(cores, 2), _MOST_WORKERS)


def _each(
    jobs: Sequence[Job],
    work: Callable[[int, Job], Made],
    workers: int,
    done: Callable[[int, Made], None],
) -> None:
    """Works on the jobs in their order, several at once; the first error ends it.

    All ranks take their groups in the same order, so that the first unfinished group of the world
    is always being worked on by all of its members, whatever the number of workers.
    """
    if workers == 1:
        for place, job in enumerate(jobs):
            done(place, work(0, job))
        return
    lock = threading.Lock()
    todo = iter(enumerate(jobs))
    errors: list[BaseException] = []

    def run(worker: int) -> None:
        while True:
            with lock:
                place, job = next(todo, (-1, None))
                if job is None or errors:
                    return
            try:
                made = work(worker, job)
            except BaseException as error:
                with lock:
                    errors.append(error)
                return
            with lock:
                done(place, made)

    threads = [
        threading.Thread(target=run, args=(worker,), name=f"commkit-groups-{worker}", daemon=True)
        for worker in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
