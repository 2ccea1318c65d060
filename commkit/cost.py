"""What creating the groups of a layout costs its busiest process: counted, not measured.

commkit.  Hosts hold `ranks_per_host` neighbouring ranks and have arrived in the order of their
ranks; each key goes the way on which the agents send it (csrc/overlay/session_routes.cc).  A rank
takes part in a group as torch's ProcessGroupNCCL does: one member sets an id of 128 bytes, one for
each 128 ranks in a larger group, and every other member waits for the ids and reads them.  A
group's keys belong to the agent of its lowest rank.  Waits of several ranks for one key travel as
one, and the answer brings the id to those who came before it was set: they read it on their host.
Before, the digests of the layout are compared, once up the tree and once down, and agents that must
find other hosts fetch their list.

torch.  The same operations at the one TCPStore of rank 0; and with TORCH_DIST_INIT_BARRIER=1 three
more of every rank of the world for every group.

A message is a request or an answer, sent or received; bytes are the messages', without TCP's own.
Neither the join is in it, which comes before, nor what NCCL does with an id.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from commkit.errors import LayoutError
from commkit.layout import Layout
from commkit.plan import group_name

ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
RANKS_PER_ID = 128  # TORCH_NCCL_RANKS_PER_ROOT, unless it is set
#: What torch appends to a group's name, about: "/cuda//", and which of the ids.
KEY_SUFFIX = 10
#: Every rank of every group is looked at.
MOST_RANKS = 1 << 20
BARRIER_OPERATIONS = 3  # of a rank, for a group

# Agents (csrc/net/codec.h, csrc/overlay/protocol.h): 8 bytes of header, 4 for a text's length.
_REQUEST = 8 + 8 + 1 + 3 * 4 + 8  # id, operation; key, value and expected value; amount
_ANSWER = 8 + 8 + 1 + 8 + 4 + 4  # id, found, number, value, keys
_DIGEST_UP = 8 + 4 + 12 + 1 + 4 + 12 + 4 + (4 + 32 + 4 + 4 + 4)  # tag, kind, peer, ranks, classes
_DIGEST_DOWN = 8 + 4 + 12 + 1 + 4
_HOST = 4 + 12 + 4 + (4 + 16) + 2  # in the list: parent, a range of ranks, an IPv4 address, port
# torch's client and its TCPStore: an operation of 1 byte, 8 for a number or a text's length.
_TOKEN = 1 + 16 + 1 + 10  # before every key: the job's token, or torch's own prefixes

# csrc/overlay/session_root.cc
_SMALLEST_DEGREE, _LARGEST_DEGREE = 4, 32


@dataclass(frozen=True, slots=True)
class Load:
    """Of one process; each figure is that of the process where it is largest."""

    process: str
    connections: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Cost:
    """`communicators`: (fewest, most) NCCL communicators of a rank, one for each of its groups.

    `single`: how many of a rank's have no other rank, at most.  `commkit`: the busiest agent;
    `torch` and `barrier`: the TCPStore of rank 0 as torch ships it, and with its barrier.
    """

    groups: int
    hosts: int
    communicators: tuple[int, int]
    single: int
    commkit: Load
    torch: Load
    barrier: Load


def estimate(layout: Layout, *, ranks_per_host: int = 8) -> Cost:
    """Goes through every group of the layout: seconds for 100,000 ranks."""
    if ranks_per_host < 1:
        raise LayoutError(f"{ranks_per_host} ranks per host: expected at least 1")
    world = layout.world_size
    if world > MOST_RANKS:
        raise LayoutError(f"{world:,} ranks are too many to count: at most {MOST_RANKS:,}")
    agents = Agents(math.ceil(world / ranks_per_host))
    per_rank, single = [0] * world, [0] * world
    total = central = central_bytes = 0
    for name, family in layout.families.items():
        key = len(f"commkit:{world - 1}/{group_name(name, (0,), 0)}") + KEY_SUFFIX
        # Families have many groups that lie on the same hosts.
        alike: Counter[tuple[tuple[int, int], ...]] = Counter()
        for ranks in family:
            total += 1
            for rank in ranks:
                per_rank[rank] += 1
            if len(ranks) == 1:
                single[ranks[0]] += 1
            hosts = sorted(rank // ranks_per_host for rank in ranks)
            alike[tuple((host, len([*same])) for host, same in groupby(hosts))] += 1
        for members, count in alike.items():
            agents.exchange(members, key, count)
            messages, size = _central(sum(ranks for _, ranks in members), key)
            central += count * messages
            central_bytes += count * size
    agents.compare_digests(len(layout.summary()))
    operations = BARRIER_OPERATIONS * world * total
    stock = Load("TCPStore of rank 0", world, central, central_bytes)
    # An operation is a request and an answer, with a key of about 60 bytes in one of them.
    with_barrier = Load(
        stock.process, world, central + 2 * operations, central_bytes + operations * 90
    )
    communicators = (min(per_rank), max(per_rank))
    busiest = agents.busiest(ranks_per_host, world)
    return Cost(total, agents.hosts, communicators, max(single), busiest, stock, with_barrier)


def _central(size: int, key: int) -> tuple[int, int]:
    """(messages, bytes) at torch's store for one group of `size` ranks."""
    ids = math.ceil(size / RANKS_PER_ID)
    member = _store_bytes(ids, key)
    set_one = 1 + 8 + _TOKEN + key + 8 + ID_BYTES
    # A set has no answer; a wait and a read for all ids together have one each.
    return ids + 4 * (size - 1), ids * set_one + (size - 1) * member


def _store_bytes(ids: int, key: int) -> int:
    """A member's wait and read over torch's protocol, with their answers."""
    return 2 * (1 + 8 + ids * (8 + _TOKEN + key)) + 1 + ids * (8 + ID_BYTES)


class Agents:
    """The agents of `hosts` hosts, and what goes over them.

    `arrival[host]` is the place of a host in the order of arrival, from which the tree follows.
    The counters are by place: `messages` and `bytes` between agents, `local` and `local_bytes`
    between an agent and its own ranks, `links` to other agents besides those of the tree.
    """

    def __init__(
        self,
        hosts: int,
        *,
        degree: int = 0,
        arrival: Sequence[int] | None = None,
    ) -> None:
        self.hosts = hosts
        chosen = min(max(math.ceil(math.sqrt(hosts)), _SMALLEST_DEGREE), _LARGEST_DEGREE)
        self.degree = degree or chosen
        self.listening = 1 if hosts <= 1 else (hosts - 2) // self.degree + 1
        self.arrival = range(hosts) if arrival is None else arrival
        self.messages, self.bytes = [0] * hosts, [0] * hosts
        self.local, self.local_bytes = [0] * hosts, [0] * hosts
        self.links: defaultdict[int, set[int]] = defaultdict(set)

    def parent(self, agent: int) -> int:
        return (agent - 1) // self.degree if agent > 0 else -1

    def children(self, agent: int) -> int:
        first = agent * self.degree + 1
        return max(0, min(self.hosts, first + self.degree) - first)

    def way(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The hops of a request from agent to agent."""
        while start != end:
            step = self._step(start, end)
            yield start, step
            start = step

    def _step(self, at: int, end: int) -> int:
        if self.parent(end) == at:
            return end
        if at >= self.listening:  # knows its parent only
            return self.parent(at)
        hop = end if end < self.listening else self.parent(end)
        while at == 0 and self.parent(hop) != 0:  # the root has the tree's connections only
            hop = self.parent(hop)
        return hop

    def exchange(self, members: Sequence[tuple[int, int]], key: int, count: int = 1) -> None:
        """The ids of `count` groups with as many ranks on each host as `members` says: (host,
        ranks), the host of the lowest rank first.  `key` is the length of a key."""
        size = sum(ranks for _, ranks in members)
        ids = math.ceil(size / RANKS_PER_ID)
        owner = self.arrival[members[0][0]]
        for index in range(ids):
            setter = self.arrival[_host_of(members, index * size // ids)]
            self.local[setter] += count
            self.local_bytes[setter] += count * (1 + 8 + _TOKEN + key + 8 + ID_BYTES)
            for hop in self.way(setter, owner):
                self._over(hop, count, _REQUEST + _ANSWER + key + ID_BYTES)
        waited: set[tuple[int, int]] = set()
        for host, ranks in members:
            agent = self.arrival[host]
            asking = ranks - (host == members[0][0])
            if asking == 0:
                continue
            self.local[agent] += 4 * count * asking
            self.local_bytes[agent] += count * asking * _store_bytes(ids, key)
            for hop in self.way(agent, owner):
                if hop not in waited:
                    waited.add(hop)
                    self._over(hop, count * ids, _REQUEST + _ANSWER + key + ID_BYTES)

    def _over(self, hop: tuple[int, int], count: int, size: int) -> None:
        """`count` requests and answers of `size` bytes together."""
        for agent, other in (hop, hop[::-1]):
            self.messages[agent] += 2 * count
            self.bytes[agent] += count * size
            if other not in (self.parent(agent), 0) and self.parent(other) != agent:
                self.links[agent].add(other)

    def compare_digests(self, description: int) -> None:
        """One digest with a text of `description` bytes, and the lists of hosts."""
        for agent in range(1, self.hosts):
            for end in (agent, self.parent(agent)):
                self.messages[end] += 2
                self.bytes[end] += _DIGEST_UP + description + _DIGEST_DOWN
        # Whoever went past the tree has asked its parent, which asks its own.
        asking = {agent for agent in self.links if agent > 0}
        for agent in [*asking]:
            while (agent := self.parent(agent)) > 0:
                asking.add(agent)
        for agent in asking:
            for end in (agent, self.parent(agent)):
                self.messages[end] += 2
                self.bytes[end] += 8 + 8 + 4 + self.hosts * _HOST

    def busiest(self, ranks_per_host: int, world: int) -> Load:
        """The largest figures; the process is the one with most messages."""
        connections = []
        for agent, host in enumerate(_inverse(self.arrival)):
            ranks = min(world, (host + 1) * ranks_per_host) - host * ranks_per_host
            tree = self.children(agent) + (agent > 0)
            # Of a rank: its own connection, and that of torch's store client.
            connections.append(2 * ranks + tree + len(self.links.get(agent, ())))
        messages = [a + b for a, b in zip(self.messages, self.local, strict=True)]
        sizes = [a + b for a, b in zip(self.bytes, self.local_bytes, strict=True)]
        agent = max(range(self.hosts), key=messages.__getitem__)
        name = f"agent of host {_inverse(self.arrival)[agent]}" + (
            ", the root" if agent == 0 else ""
        )
        return Load(name, max(connections), messages[agent], max(sizes))


def _host_of(members: Sequence[tuple[int, int]], position: int) -> int:
    for host, ranks in members:
        if position < ranks:
            return host
        position -= ranks
    raise AssertionError("a position outside the group")


def _inverse(places: Sequence[int]) -> list[int]:
    result = [0] * len(places)
    for index, place in enumerate(places):
        result[place] = index
    return result
