"""Several groups of one rank at once, each named and met under names that all members know.

Groups of a back end that connects are made by a few threads; others one after the other.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Store

from commkit import creation, plan
from commkit.errors import CommkitError
from commkit.journal import Entry, Journal
from commkit.overlay import World
from commkit.store import open_store
from commkit.stragglers import Stragglers
from commkit.trouble import Task, attend, explain

#: Threads that create groups of one rank, at most; each has a connection to the host's agent.
_MOST_WORKERS = 16

#: Connections that are kept for the next creation.
_MOST_IDLE = 16


@dataclass(slots=True)
class Made:
    """One group that this rank has made, and the seconds that it took."""

    family: str
    ranks: tuple[int, ...]
    name: str
    backend: str
    seconds: float
    group: ProcessGroup


@dataclass(frozen=True, slots=True)
class Creation:
    """What is remembered of a group; the group itself only for as long as somebody uses it."""

    family: str
    size: int
    backend: str
    seconds: float
    group: weakref.ref[ProcessGroup]


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

    @property
    def what(self) -> str:
        return f"group {self.entry.shown()} ({self.backend})"

    @property
    def waits(self) -> bool:
        """Whether its creation waits for other ranks."""
        return len(self.group.ranks) > 1 and creation.connects(self.backend, self.device)

    @property
    def blocks(self) -> bool:
        """Whether it waits for them where no deadline holds."""
        return len(self.group.ranks) > 1 and creation.blocks(self.backend, self.device)


class Connections:
    """Clients of torch's store, each lent to one thread at a time.

    A client holds its lock while it waits: threads that create groups in unlike orders and share
    one would wait in a circle.
    """

    def __init__(self, world: World, store: Store, limit: timedelta) -> None:
        self._world = world
        self._lock = threading.Lock()
        self._idle = [(limit, store)]  # what each was opened for; least recently used first

    @contextlib.contextmanager
    def one(self, timeout: timedelta) -> Iterator[Store]:
        """A client whose own waits end after `timeout`; the groups made with it keep it."""
        with self._lock:
            found = [place for place, (limit, _) in enumerate(self._idle) if limit == timeout]
            store = self._idle.pop(found[-1])[1] if found else None
        if store is None:
            store = open_store(self._world, timeout.total_seconds())
        try:
            yield store
        finally:
            with self._lock:
                self._idle.append((timeout, store))
                del self._idle[:-_MOST_IDLE]


@dataclass(slots=True)
class Joined:
    """The tree behind torch's default group."""

    world: World
    journal: Journal
    stragglers: Stragglers
    connections: Connections

    def met(self, group: Entry, waited: bool) -> None:
        """This rank's part of a group exists; `waited`: that of the others as well."""
        if len(group.ranks) > 1:
            self.world.connected(group.name, group.ranks)
            # Of a group of the whole world one rank asks for the others: it has to ask them singly.
            asks = (
                len(group.ranks) < self.world.identity.world_size or self.world.identity.rank == 0
            )
            if not waited and asks:
                self.stragglers.expect(group)

    def meet(self, group: Entry, timeout: timedelta) -> None:
        """Waits until all members have begun: what follows may have no deadline of its own."""
        self.world.meet(f"begun/{group.name}", group.ranks, timeout.total_seconds())

    def explain(
        self,
        error: BaseException,
        group: Entry,
        backend: str,
        began: float,
        timeout: timedelta,
    ) -> CommkitError | None:
        """The error to raise instead of one that ended a creation; None: that one."""
        return explain(
            self.world,
            error,
            f"group {group.shown()} ({backend})",
            began + timeout.total_seconds(),
            lambda: self.journal.missing(group),
        )


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
    """What the jobs ask for, in their order.

    With `share`, jobs with the same ranks, back end and timeout and no options get one group.
    Raises JoinTimeout, JoinError or RankDied naming the group and who is to blame.
    """
    first: dict[Any, int] = {}
    same = []  # per job, the one whose group it takes
    for index, job in enumerate(jobs):
        key = (job.group.ranks, job.backend, job.timeout) if share and not job.options else index
        same.append(first.setdefault(key, index))
    todo = [index for index, other in enumerate(same) if other == index]
    joined.journal.begin([jobs[index].entry for index in todo])
    with joined.world.creating():
        groups = dict(zip(todo, _create_all(joined, [jobs[index] for index in todo]), strict=True))
    for index in todo:
        joined.met(jobs[index].entry, jobs[index].waits)
    return [
        groups[other] if other == index else made(jobs[index], groups[other].group, 0.0)
        for index, other in enumerate(same)
    ]


def split_job(
    joined: Joined,
    job: Job | None,
    other: Sequence[int],
    family: str,
    settings: tuple[str, timedelta, Any],
) -> Made | None:
    """This rank's group of one wave of a family, split off the whole world's communicator.

    Every rank takes part; one without a job names any `other` group of the family.
    """
    began = time.monotonic()
    _, timeout, options = settings
    if job is not None:
        joined.journal.begin([job.entry])
    joined.world.barrier(tag=f"split/{family}", timeout=timeout.total_seconds())
    # The split itself waits for all ranks, and knows no deadline.
    work = partial(
        creation.split,
        job.group.name if job is not None else f"commkit:no member of {family}",
        job.group.ranks if job is not None else other,
        job is not None,
        timeout=timeout,
        options=options,
        desc=family,
    )
    what = f"the split of family {family!r}"
    (group,) = attend(joined.world, [Task(work, timeout.total_seconds(), what)])
    if job is None or group is None:
        return None
    joined.met(job.entry, True)
    return made(job, group, time.monotonic() - began)


def _create_all(joined: Joined, jobs: Sequence[Job]) -> list[Made]:
    waiting = [job for job in jobs if job.waits]
    if len(waiting) <= 1 and not any(job.blocks for job in jobs):
        return [_create_one(joined, job) for job in jobs]
    # All ranks take their groups in the same order, so that the first unfinished group of the world
    # is always being worked on by all of its members, whatever the number of threads.
    tasks = [
        # Once to come together, once to connect.
        Task(partial(_create_one, joined, job), 2 * job.timeout.total_seconds(), job.what)
        for job in jobs
    ]
    return attend(joined.world, tasks, min(len(waiting), _workers(joined.world)))


def _create_one(joined: Joined, job: Job) -> Made:
    began = time.monotonic()
    try:
        with joined.connections.one(job.timeout) as connection:
            if job.blocks:
                joined.meet(job.entry, job.timeout)
            group = create(job, creation.store_for(job.group.ranks, connection))
    except Exception as error:
        explained = joined.explain(error, job.entry, job.backend, began, job.timeout)
        if explained is None:
            raise
        raise explained from error
    return made(job, group, time.monotonic() - began)


def _workers(world: World) -> int:
    cores = len(os.sched_getaffinity(0)) // world.identity.local_world_size
    return min(max(cores, 2), _MOST_WORKERS)
