"""Groups of a whole parallel layout, each made by its members only, all of a rank's at once.

Nothing about a group depends on what a rank did outside it: its name comes from (family, ranks, how
often this rank set was used), its keys live with the agent of its lowest rank, and non-members do
nothing.  Before any group of a declared layout is made, one reduction over the tree compares what
the ranks have declared.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as torch_c10d
from torch._C._distributed_c10d import ProcessGroup, Store

from commkit import _C, creation, layout, plan
from commkit.errors import LayoutError, UsageError
from commkit.families import Family
from commkit.journal import Journal
from commkit.layout import Layout
from commkit.making import (
    Connections,
    Creation,
    Job,
    Joined,
    Made,
    create,
    create_jobs,
    made,
    split_job,
)
from commkit.overlay import World
from commkit.ranks import check_ranks
from commkit.settings import load
from commkit.stragglers import Stragglers

#: Much of it is torch's own business and not declared.
c10d: Any = torch_c10d

#: What may be given once for all families, or family by family.
Timeouts = timedelta | Mapping[str, timedelta] | None
Backends = str | Mapping[str, str] | None

NON_MEMBER: Any = dist.GroupMember.NON_GROUP_MEMBER

#: Creations that are remembered for a report of the start-up.
MOST_REMEMBERED = 4096


@dataclass(slots=True)
class _Registry:
    """What was made since torch's default group exists."""

    default: ProcessGroup
    #: Those that were destroyed are not kept: a group is sockets and threads.
    families: dict[str, list[weakref.ref[ProcessGroup]]] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)  # family -> what describes its groups
    created: list[Creation] = field(default_factory=list)  # the first MOST_REMEMBERED
    generations: plan.Generations = field(default_factory=plan.Generations)
    seconds: dict[str, float] = field(default_factory=dict)  # of phases that are no family's

    def remember(self, one: Made) -> None:
        if len(self.created) < MOST_REMEMBERED:
            group = weakref.ref(one.group)
            size = len(one.ranks)
            self.created.append(Creation(one.family, size, one.backend, one.seconds, group))

    def of(self, family: str) -> list[ProcessGroup]:
        """The groups of a family, if there is one, that have not been destroyed."""
        alive = c10d._world.pg_map
        known = (group() for group in self.families.get(family, ()))
        return [group for group in known if group is not None and group in alive]

    def spent(self, phase: str, began: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began


_joined: Joined | None = None
_registry: _Registry | None = None
_registry_lock = threading.Lock()


def attach(world: World, store: Store, limit: timedelta) -> None:
    """Groups are made over this world from now on; `store` is its connection of this rank."""
    global _joined
    journal = Journal(world)
    connections = Connections(world, store, limit)
    _joined = Joined(world, journal, Stragglers(world, journal), connections)


def detach() -> None:
    """Forgets the world and every group of it."""
    global _joined, _registry
    if _joined is not None:
        _joined.stragglers.stop()
    _joined = _registry = None


def joined() -> Joined | None:
    """The world that groups are made over; None if commkit did not start torch's default group."""
    return _joined


def incomplete() -> list[str]:
    """The newest groups of this rank that members did not come to, and who they are.

    Asks the agents, for some seconds at most: for the end of a rank that failed.
    """
    return _joined.journal.unmet() if _joined is not None else []


def generations() -> plan.Generations:
    """The counts of rank sets used since torch's default group exists."""
    return _registry_of(c10d._get_default_group()).generations


def _forget() -> None:
    # A forked child is no rank of the world.  Another thread may hold any lock meanwhile.
    global _joined, _registry, _registry_lock
    _joined = _registry = None
    _registry_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def new_groups(
    families: str | Layout | Mapping[str, Iterable[Any]],
    *,
    timeout: Timeouts = None,
    backend: Backends = None,
    options: Any = None,
    share: bool = False,
    replace: bool = False,
) -> dict[str, ProcessGroup]:
    """Creates all groups of a layout; returns this rank's, by family.

    Every rank of the world calls it with the same `families`: a text such as "tp=8,cp=2,pp=4", a
    Layout, or explicit lists of ranks {family: [[0, 1], [2, 3]]}, whose order is kept.  The ranks'
    declarations are compared first; then each rank makes the groups that it is in, at the same
    time where a back end has to connect.

    timeout, backend, options: as in torch's new_group; one value, or {family: value} (families that
    are not named take the default).  With `share`, families with the same ranks, back end and
    timeout get one group, and one communicator, between them.  A family that exists already is an
    error, unless `replace`: then its groups are destroyed once the new ones exist.

    In a family whose groups overlap a rank may be in several: the dict has the first, get_groups
    all.  A family that this rank is in no group of is not in the dict.

    Raises DigestMismatch (the ranks declare different things: names the first that differs and
    how; nothing was created), LayoutError, RankDied, JoinTimeout naming who did not come.
    """
    default = c10d._get_default_group()
    registry = _registry_of(default)
    wanted = as_layout(families, default.size())
    exist = [name for name in wanted.families if not replace and registry.of(name)]
    settings = _Settings(default, wanted, timeout, backend, options)
    began = time.monotonic()
    if _joined is not None:
        # Also what exists: a rank that a family has no group on does not know.
        described = settings.describe() + "".join(f"; {name!r} exists already" for name in exist)
        _joined.world.agree(
            _C.sha256(wanted.digest() + described.encode()),
            f"{wanted.summary()}; {described}",
            tag="groups",
            timeout=settings.longest.total_seconds(),
        )
        registry.spent("digest", began)
    if exist:
        raise UsageError(
            f"family {exist[0]!r} exists already; destroy its groups, choose another name, or say "
            "replace=True"
        )
    if _joined is None:
        made = _create_as_torch(default, wanted, settings)
    else:
        mine = plan.make(wanted, default.rank(), registry.generations)
        made = _create(_joined, wanted, mine, settings, share)
    replaced = [group for name in wanted.families for group in registry.of(name)]
    for name, family in wanted.families.items():
        registry.families[name] = []
        registry.layouts[name] = family.describe()
    for one in made:
        registry.families[one.family].append(weakref.ref(one.group))
        registry.remember(one)
    registry.spent("groups", began)
    kept = [group for name in registry.families for group in registry.of(name)]
    for group in dict.fromkeys(replaced):
        if group not in kept:  # by a family that shares it
            dist.destroy_process_group(group)
    return {one.family: one.group for one in reversed(made)}


def _create(
    joined: Joined, wanted: Layout, mine: plan.GroupPlan, settings: _Settings, share: bool
) -> list[Made]:
    jobs = [settings.job(group) for group in mine.groups]
    if load().groups != "split":
        return create_jobs(joined, jobs, share)
    made: dict[int, Made] = {}
    waves = iter(mine.waves)
    for family in wanted.families.values():
        own = [next(waves) for _ in range(family.waves)]
        if settings.splits(family):
            for places in own:
                job = jobs[places[0]] if places else None
                # Any group will do for a rank that is in none of this wave.
                other = next((ranks for ranks in family if mine.rank not in ranks), ())
                one = split_job(joined, job, other, family.name, settings.of(family.name))
                if one is not None:
                    made[places[0]] = one
    rest = [index for index in range(len(jobs)) if index not in made]
    made.update(zip(rest, create_jobs(joined, [jobs[index] for index in rest], share), strict=True))
    return [made[index] for index in range(len(jobs))]


def new_group(
    ranks: Any = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> Any:
    """torch's new_group, made by its members only: others need not call it, and may.

    The members call it with the same ranks, in any order among their calls: which call meets which
    follows from (group_desc, ranks, how often this rank used these two).  Returns the group, or
    GroupMember.NON_GROUP_MEMBER on other ranks.  `use_local_synchronization` changes nothing.
    Raises LayoutError (a ValueError) for ranks that are no group of this world.
    """
    default = c10d._get_default_group()
    members = check_ranks(ranks, default.size())
    if sort_ranks:
        members = tuple(sorted(members))
    if default.rank() not in members:
        return NON_MEMBER
    family = group_desc or ""
    return _single(default, family, members, family, backend, timeout, pg_options, device_id)


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> ProcessGroup | None:
    """torch's split_group, for any back end: groups of ranks of `parent_pg`, as that one has them.

    Each new group is made by its members only: whether the parent has communicators yet makes no
    difference.  None on ranks that no split names.
    """
    default = c10d._get_default_group()
    parent = parent_pg or default
    places = c10d._world.pg_group_ranks.get(parent)
    if places is None:
        raise ValueError(f"split_group: {parent} is no group of this process")
    if default.rank() not in places:
        raise ValueError(f"split_group: rank {default.rank()} is not in the parent group")
    if not split_ranks:
        raise LayoutError("split_group: split_ranks is empty; expected lists of the parent's ranks")
    world_ranks = {place: rank for rank, place in places.items()}
    chosen: tuple[int, ...] | None = None
    seen: dict[int, int] = {}
    for index, ranks in enumerate(split_ranks):
        group = tuple(sorted(check_ranks(ranks, len(places), f"split_group, split {index}")))
        for rank in group:
            if rank in seen:
                raise LayoutError(
                    f"split_group: rank {rank} of the parent is in splits {seen[rank]} and "
                    f"{index}; splits must not overlap"
                )
            seen[rank] = index
        if places[default.rank()] in group:
            chosen = group
    if chosen is None:
        return None
    members = tuple(world_ranks[place] for place in chosen)
    family = f"{parent.group_name}:split"
    kind = str(c10d._world.pg_map[parent][0])
    label = group_desc or family
    return _single(default, family, members, label, kind, timeout, pg_options, None)


def device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    timeout: Timeouts = None,
    backend: Backends = None,
    options: Any = None,
) -> Any:
    """torch's init_device_mesh over new_groups: a torch DeviceMesh of this shape, row-major.

    A dimension whose name is a family that exists already, with the same groups, takes those.
    Dimensions without names are called dim0_of_4x2, dim1_of_4x2, ...
    """
    # Imported now: it takes long, and nobody waits yet.
    from torch.distributed.device_mesh import DeviceMesh

    default = c10d._get_default_group()
    shape = "x".join(map(str, mesh_shape))
    names = tuple(mesh_dim_names or (f"dim{index}_of_{shape}" for index in range(len(mesh_shape))))
    wanted = layout.from_mesh(tuple(mesh_shape), names, default.size())
    registry = _registry_of(default)
    fresh = {
        name: family
        for name, family in wanted.families.items()
        if registry.layouts.get(name) != family.describe() or not registry.of(name)
    }
    if fresh:
        new_groups(
            Layout(default.size(), MappingProxyType(fresh)),
            timeout=timeout,
            backend=backend,
            options=options,
        )
    groups = [registry.of(name)[0] for name in names]
    ranks = torch.arange(default.size(), dtype=torch.int).view(tuple(mesh_shape))
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def get_group(family: str) -> Any:
    """This rank's group of a family that new_groups has made.

    GroupMember.NON_GROUP_MEMBER if it is in none.  Raises UsageError for a family that does not
    exist, or one in which this rank has several groups (get_groups gives them).
    """
    groups = get_groups(family)
    if len(groups) > 1:
        raise UsageError(
            f"rank {c10d._get_default_group().rank()} is in {len(groups)} groups of family "
            f"{family!r}; get_groups({family!r}) gives them"
        )
    return groups[0] if groups else NON_MEMBER


def get_groups(family: str) -> list[ProcessGroup]:
    """All groups of a family that this rank is in and that have not been destroyed."""
    registry = _registry_of(c10d._get_default_group())
    if family not in registry.families:
        known = ", ".join(registry.families) or "none"
        raise UsageError(f"no family is called {family!r}; there are: {known}")
    return registry.of(family)


def remember(one: Made) -> None:
    """Notes what the creation of a group took that torch's own functions have made."""
    _registry_of(c10d._get_default_group()).remember(one)


def used(seconds: Mapping[str, float]) -> None:
    """Notes what the first use of groups took, by phase."""
    _registry_of(c10d._get_default_group()).seconds.update(seconds)


def timings() -> tuple[dict[str, float], list[Creation]]:
    """Seconds of phases that are no family's, and what this rank made, in the order of making."""
    if _registry is None:
        return {}, []
    return dict(_registry.seconds), list(_registry.created)


class _Settings:
    """Back end, timeout, options and device of each family."""

    def __init__(
        self,
        default: ProcessGroup,
        wanted: Layout,
        timeout: Timeouts,
        backend: Backends,
        options: Any,
    ) -> None:
        given = {"timeout": timeout, "backend": backend, "options": options}
        for what, value in given.items():
            if isinstance(value, Mapping):
                for name in value:
                    if name not in wanted.families:
                        raise UsageError(
                            f"{what} for family {name!r}, which the layout does not have; it has "
                            f"{', '.join(wanted.families)}"
                        )
        self._of: dict[str, tuple[str, timedelta, Any]] = {}
        for name in wanted.families:
            kind, limit = _defaults(default, _for(name, backend), _for(name, timeout))
            self._of[name] = (kind, limit, _for(name, options))
        self._device = _bound(default, None)
        self.longest = max(
            (limit for _, limit, _ in self._of.values()), default=c10d._get_default_timeout("gloo")
        )

    def of(self, family: str) -> tuple[str, timedelta, Any]:
        return self._of[family]

    def job(self, group: plan.Group) -> Job:
        return Job(group, *self._of[group.family], self._device)

    def splits(self, family: Family) -> bool:
        """Whether the groups of a family can be split off: torch's split sorts their ranks."""
        kind, _, _ = self._of[family.name]
        return (
            family.sizes[1] > 1
            and creation.splits(kind, self._device)
            and all(list(ranks) == sorted(ranks) for ranks in family)
        )

    def describe(self) -> str:
        kinds = {kind for kind, _, _ in self._of.values()}
        if len(kinds) == 1:
            return f"backend {kinds.pop()}"
        return ", ".join(f"{name} on {kind}" for name, (kind, _, _) in self._of.items())


def _for(name: str, value: Any) -> Any:
    # None first: to tell what is no Mapping takes long.
    return value.get(name) if value is not None and isinstance(value, Mapping) else value


def _defaults(
    default: ProcessGroup, backend: str | None, timeout: timedelta | None
) -> tuple[str, timedelta]:
    kind = dist.Backend(backend or c10d._world.pg_map[default][0])
    limit: timedelta = c10d._get_default_timeout(kind) if timeout is None else timeout
    if not isinstance(limit, timedelta) or limit <= timedelta(0):
        raise UsageError(f"timeout={timeout!r}: expected a positive datetime.timedelta")
    return str(kind), limit


def _bound(default: ProcessGroup, device: torch.device | None) -> torch.device | None:
    bound: torch.device | None = default.bound_device_id
    if device is not None and bound is not None and device != bound:
        raise ValueError(
            f"device_id={device} is not {bound}, to which init_process_group bound this rank"
        )
    return device if device is not None else bound


def as_layout(families: str | Layout | Mapping[str, Iterable[Any]], world_size: int) -> Layout:
    """What new_groups takes, as a Layout of a world of this size.  Raises LayoutError."""
    if isinstance(families, Layout):
        if families.world_size != world_size:
            raise LayoutError(
                f"the layout is one of {families.world_size} ranks, the world has {world_size}"
            )
        return families
    if isinstance(families, str):
        return layout.parse(families, world_size)
    return layout.from_lists(families, world_size)


def _registry_of(default: ProcessGroup) -> _Registry:
    global _registry
    with _registry_lock:
        if _registry is None or _registry.default is not default:
            _registry = _Registry(default)
        return _registry


def _single(
    default: ProcessGroup,
    family: str,
    members: tuple[int, ...],
    label: str,
    backend: str | None,
    timeout: timedelta | None,
    options: Any,
    device: torch.device | None,
) -> ProcessGroup:
    """One group that this rank is in, outside any layout; `label` is what people call it."""
    registry = _registry_of(default)
    group = plan.Group(
        label,
        members,
        registry.generations.named(family, members),
        members.index(default.rank()),
    )
    job = Job(group, *_defaults(default, backend, timeout), options, _bound(default, device))
    if _joined is not None:
        one = create_jobs(_joined, [job], share=False)[0]
    else:
        began = time.monotonic()
        pg = create(job, c10d._world.pg_map[default][1])
        one = made(job, pg, time.monotonic() - began)
    registry.remember(one)
    return one.group


def _create_as_torch(default: ProcessGroup, wanted: Layout, settings: _Settings) -> list[Made]:
    """Without commkit's tree: torch's new_group, all ranks for every group, one after the other."""
    made = []
    for family in wanted.families.values():
        kind, limit, options = settings.of(family.name)
        for ranks in family:
            began = time.monotonic()
            unsorted: Any = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
            group = dist.new_group(
                list(ranks), limit, kind, options, group_desc=family.name, **unsorted
            )
            if default.rank() in ranks:
                seconds = time.monotonic() - began
                made.append(Made(family.name, ranks, group.group_name, kind, seconds, group))
    return made
