"""What a job sends between its hosts: families of rank groups and what they do -> bytes per edge.

A family is plain data: groups of ranks in their order, a collective, and its size.  `demand` folds
ranks into logical hosts as NCCL joins them: a ring or tree enters each host once and follows the
order in which hosts first appear in the group, so rank order alone decides which hosts talk.

Bytes are those of one step and one directed edge.  Sizes are what nccl-tests calls the size: for
all_reduce the buffer, for all_gather what each rank ends with, for reduce_scatter what it starts
with, for all_to_all what a rank sends altogether, its own part included; for send_recv what crosses
one boundary of the pipeline in one direction.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from commkit.errors import UsageError

#: No step sends more; the squares of its bytes are still numbers.
MAX_BYTES = 1e30

# Patterns of a family, by what its members send:
#   ring         each to the next, the last to the first
#   tree         NCCL's two binary trees, up and down
#   pairs        each to every other
#   line, loop   neighbours both ways; in a loop the last and the first are neighbours, too
#   edges        listed one by one

#: (collective, algorithm) -> (pattern, bytes on a directed edge as a share of the size, n members)
COLLECTIVES: Mapping[tuple[str, str], tuple[str, Callable[[int], float]]] = {
    ("all_reduce", "ring"): ("ring", lambda n: 2 * (n - 1) / n),
    ("all_reduce", "tree"): ("tree", lambda n: 0.5),
    ("all_gather", "ring"): ("ring", lambda n: (n - 1) / n),
    ("reduce_scatter", "ring"): ("ring", lambda n: (n - 1) / n),
    ("all_to_all", "pairs"): ("pairs", lambda n: 1 / n),
    ("send_recv", "line"): ("line", lambda n: 1.0),
    ("send_recv", "loop"): ("loop", lambda n: 1.0),
}


def algorithms(collective: str) -> list[str]:
    """Of a collective, the first is its default."""
    return [a for c, a in COLLECTIVES if c == collective]


@dataclass(frozen=True)
class Family:
    """Rank groups that do one collective of `size` bytes a step.

    Raises UsageError for a collective or algorithm that is not known, a rank twice in a group, a
    negative size.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    collective: str
    size: float
    algorithm: str = ""

    def __post_init__(self) -> None:
        known = algorithms(self.collective)
        if not known:
            names = ", ".join(dict.fromkeys(c for c, _ in COLLECTIVES))
            raise UsageError(
                f"family {self.name}: collective {self.collective!r}: expected one of {names}"
            )
        if not self.algorithm:
            object.__setattr__(self, "algorithm", known[0])
        if self.algorithm not in known:
            raise UsageError(
                f"family {self.name}: {self.collective} by {self.algorithm!r}: expected "
                + " or ".join(known)
            )
        if not (self.size == 0 or 1 <= self.size <= MAX_BYTES):
            raise UsageError(
                f"family {self.name}: {self.size} bytes: expected 0, or 1 to {MAX_BYTES:g}"
            )
        for group in self.groups:
            if len(set(group)) != len(group):
                raise UsageError(f"family {self.name}: a rank occurs twice in {list(group)[:9]}")

    @property
    def pattern(self) -> str:
        return COLLECTIVES[self.collective, self.algorithm][0]

    def edge_bytes(self, members: int) -> float:
        """Bytes a step on one directed edge of a group (of each tree, if they are trees)."""
        return self.size * COLLECTIVES[self.collective, self.algorithm][1](members)

    def edges(self) -> Iterator[tuple[int, int, float]]:
        """(source rank, destination rank, bytes) over all groups."""
        for group in self.groups:
            share = self.edge_bytes(len(group)) if len(group) > 1 else 0.0
            for a, b in pattern_edges(self.pattern, len(group)):
                yield group[a], group[b], share


def pattern_edges(pattern: str, members: int) -> Iterator[tuple[int, int]]:
    """Directed edges among positions 0..members-1; one that two trees share comes twice."""
    if members < 2:
        return
    if pattern == "ring":
        yield from ((i, (i + 1) % members) for i in range(members))
    elif pattern in ("line", "loop"):
        for i in range(members - 1):
            yield i, i + 1
            yield i + 1, i
        if pattern == "loop" and members > 2:
            yield members - 1, 0
            yield 0, members - 1
    elif pattern == "pairs":
        yield from itertools.permutations(range(members), 2)
    else:
        for mirrored in (False, True):
            for child, parent in enumerate(_tree(members, mirrored)):
                if parent >= 0:
                    yield child, parent
                    yield parent, child


def _tree(members: int, mirrored: bool) -> list[int]:
    """Each position's parent, -1 for the root, in one of NCCL's two trees.

    The first is a binary tree by the lowest set bit; the second is its mirror image where the
    number of members is even, and the first shifted by one where it is odd: a leaf of one is then
    no leaf of the other (NCCL, ncclGetDtree).
    """

    def up(rank: int) -> int:
        if rank == 0:
            return -1
        bit = rank & -rank
        parent = (rank ^ bit) | (bit << 1)
        return parent if parent < members else rank ^ bit

    if not mirrored:
        return [up(rank) for rank in range(members)]
    if members % 2 == 0:
        ups = [up(members - 1 - rank) for rank in range(members)]
        return [-1 if u < 0 else members - 1 - u for u in ups]
    ups = [up((rank - 1) % members) for rank in range(members)]
    return [-1 if u < 0 else (u + 1) % members for u in ups]


# --- Hosts -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostGroup:
    """Logical hosts that talk in a pattern.

    edge_bytes  bytes a step on one directed edge, all rails together (each tree's, if trees)
    rails       the local ranks whose NICs carry it, in even shares
    edges       for the pattern "edges" only: (source, destination, bytes)
    """

    hosts: tuple[int, ...]
    edge_bytes: float
    rails: tuple[int, ...]
    edges: tuple[tuple[int, int, float], ...] = ()

    def each(self, pattern: str) -> Iterator[tuple[int, int, float]]:
        """(source host, destination host, bytes)."""
        if pattern == "edges":
            yield from self.edges
            return
        for a, b in pattern_edges(pattern, len(self.hosts)):
            yield self.hosts[a], self.hosts[b], self.edge_bytes


@dataclass(frozen=True)
class HostFamily:
    name: str
    pattern: str
    groups: tuple[HostGroup, ...]


@dataclass(frozen=True)
class Demand:
    """What `hosts` logical hosts send one another in a step; traffic inside a host is left out.

    forwarded: bytes a step of edges whose two ends have different local ranks.  Where rails meet
    only inside hosts these are forwarded there (NCCL's PXN); in a rail-optimised fabric they
    cross a spine even under one leaf group.
    """

    hosts: int
    families: tuple[HostFamily, ...]
    forwarded: float = 0.0

    @property
    def rails(self) -> tuple[int, ...]:
        return tuple(sorted({r for f in self.families for g in f.groups for r in g.rails}))

    def edges(self) -> Iterator[tuple[int, int, float]]:
        for family in self.families:
            for group in family.groups:
                yield from group.each(family.pattern)


def hosts_of_ranks(ranks_per_host: Sequence[int]) -> list[tuple[int, int]]:
    """Rank -> (logical host, local rank), ranks in order host by host."""
    return [(h, local) for h, count in enumerate(ranks_per_host) for local in range(count)]


def demand(families: Iterable[Family], ranks_per_host: Sequence[int]) -> Demand:
    """Fold rank groups into host groups.

    Raises UsageError for a rank beyond the world.  Cost: proportional to the members of all groups,
    and to the square of a group's hosts only where an all-to-all is uneven.
    """
    at = hosts_of_ranks(ranks_per_host)
    made: list[HostFamily] = []
    forwarded = 0.0
    for family in families:
        even: dict[tuple[int, ...], tuple[float, list[int]]] = {}
        odd: list[HostGroup] = []
        for ranks in family.groups:
            for rank in ranks:
                if not 0 <= rank < len(at):
                    raise UsageError(
                        f"family {family.name}: rank {rank}: expected 0 to {len(at) - 1}, the "
                        f"ranks of {len(ranks_per_host)} hosts"
                    )
            share = family.edge_bytes(len(ranks)) if len(ranks) > 1 else 0.0
            if not share:
                continue
            members: dict[int, list[int]] = {}
            for rank in ranks:
                host, local = at[rank]
                members.setdefault(host, []).append(local)
            if len(members) < 2:
                continue
            forwarded += _forwarded(family, [at[rank] for rank in ranks], share)
            if _is_even(family.pattern, [at[rank][0] for rank in ranks], members):
                if family.pattern == "pairs":
                    share *= len(next(iter(members.values()))) ** 2
                total, rails = even.setdefault(tuple(members), (0.0, []))
                rails += [local for locals_ in members.values() for local in locals_]
                even[tuple(members)] = (total + share, rails)
            else:
                odd.append(_uneven(family.pattern, ranks, at, share))
        groups = tuple(
            HostGroup(hosts, share, tuple(sorted(set(rails))))
            for hosts, (share, rails) in even.items()
        )
        if groups:
            made.append(HostFamily(family.name, family.pattern, groups))
        if odd:
            made.append(HostFamily(family.name, "edges", tuple(odd)))
    return Demand(len(ranks_per_host), tuple(made), forwarded)


def _is_even(pattern: str, hosts: Sequence[int], members: Mapping[int, Sequence[int]]) -> bool:
    if pattern in ("ring", "tree"):
        return True
    if pattern == "pairs":
        return len({len(locals_) for locals_ in members.values()}) == 1
    # Stages of a pipeline talk rank to rank: hosts must not come back.
    return len([host for host, _ in itertools.groupby(hosts)]) == len(members)


def _uneven(
    pattern: str, ranks: Sequence[int], at: Sequence[tuple[int, int]], share: float
) -> HostGroup:
    total: dict[tuple[int, int], float] = {}
    for a, b in pattern_edges(pattern, len(ranks)):
        pair = at[ranks[a]][0], at[ranks[b]][0]
        if pair[0] != pair[1]:
            total[pair] = total.get(pair, 0.0) + share
    hosts = tuple(dict.fromkeys(at[rank][0] for rank in ranks))
    rails = tuple(sorted({at[rank][1] for rank in ranks}))
    return HostGroup(hosts, 0.0, rails, tuple((a, b, w) for (a, b), w in total.items()))


def _forwarded(family: Family, places: Sequence[tuple[int, int]], share: float) -> float:
    """Bytes of edges between hosts whose ends have different local ranks."""
    locals_ = {local for _, local in places}
    if len(locals_) == 1:
        return 0.0
    if family.pattern in ("ring", "tree"):
        # A channel enters and leaves a host by the NIC of one rail, wherever members sit on all.
        hosts: dict[int, set[int]] = {}
        for host, local in places:
            hosts.setdefault(host, set()).add(local)
        if set.intersection(*hosts.values()):
            return 0.0
    return sum(
        share
        for a, b in pattern_edges(family.pattern, len(places))
        if places[a][0] != places[b][0] and places[a][1] != places[b][1]
    )


# --- NCCL's connections ----------------------------------------------------------------------


@dataclass(frozen=True)
class Flow:
    """One queue pair's share of a connection between two logical hosts."""

    family: str
    source: int
    destination: int
    rail: int
    channel: int
    queue_pair: int
    bytes: float


def nccl_flows(
    wanted: Demand, *, channels: int = 1, queue_pairs: int = 1, family: str | None = None
) -> Iterator[Flow]:
    """The inter-host flows that carry `wanted`, one for each rail, channel and queue pair.

    channels     connections an edge and rail: NCCL gives each channel one of its own
    queue_pairs  NCCL_IB_QPS_PER_CONNECTION.  A connection's bytes are spread evenly over its queue
                 pairs: message by message in turn, or, with NCCL_IB_SPLIT_DATA_ON_QPS=1, within
                 each message; an operation of a single message then needs the latter
    """
    for some in wanted.families:
        if family is not None and some.name != family:
            continue
        for group in some.groups:
            parts = len(group.rails) * channels * queue_pairs
            for a, b, amount in group.each(some.pattern):
                for rail in group.rails:
                    for channel in range(channels):
                        for queue_pair in range(queue_pairs):
                            yield Flow(some.name, a, b, rail, channel, queue_pair, amount / parts)
