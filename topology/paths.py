"""Flows to uplinks: the even assignment, ports that realise it, and advice where ports cannot.

With U uplinks (spines) a flow from leaf a to leaf b loads the same spine's link at both.  Giving
every flow a spine so that no link of a leaf has more than ceil(flows of the leaf / U) is an edge
colouring: split each leaf into nodes of at most U flows; the bipartite multigraph of source and
destination nodes then has an edge colouring with U colours (Koenig), each colour at most once at a
node, hence at most ceil(flows / U) times at a leaf, up and down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from commkit.errors import UsageError
from commkit.topology.collisions import conflict, expected_fullest
from commkit.topology.ecmp import FiveTuple, Hash


def fullest(flows: Iterable[tuple[int, int]], paths: Iterable[int]) -> int:
    """Most flows on one link, up from a leaf or down to one."""
    up: dict[tuple[int, int], int] = {}
    down: dict[tuple[int, int], int] = {}
    for (a, b), path in zip(flows, paths, strict=True):
        up[a, path] = up.get((a, path), 0) + 1
        down[b, path] = down.get((b, path), 0) + 1
    return max((*up.values(), *down.values()), default=0)


def least_fullest(flows: Iterable[tuple[int, int]], uplinks: int) -> int:
    """The bound: ceil(flows / uplinks) of the leaf that sends or receives most."""
    up: dict[int, int] = {}
    down: dict[int, int] = {}
    for a, b in flows:
        up[a] = up.get(a, 0) + 1
        down[b] = down.get(b, 0) + 1
    return -(-max((*up.values(), *down.values()), default=0) // uplinks)


def assign(flows: Sequence[tuple[int, int]], uplinks: int) -> list[int]:
    """An uplink for each flow (source leaf, destination leaf): no link above `least_fullest`.

    Raises UsageError for no uplinks, or a flow within one leaf: it takes no uplink.
    """
    if uplinks < 1:
        raise UsageError(f"{uplinks} uplinks: expected 1 or more")
    sources: dict[int, int] = {}
    targets: dict[int, int] = {}
    edges: list[tuple[int, int]] = []
    nodes: dict[tuple[bool, int, int], int] = {}
    for number, (a, b) in enumerate(flows):
        if a == b:
            raise UsageError(f"flow {number} stays under leaf {a}: expected flows between leaves")
        i, j = sources.get(a, 0), targets.get(b, 0)
        sources[a], targets[b] = i + 1, j + 1
        edges.append(
            (
                nodes.setdefault((False, a, i // uplinks), len(nodes)),
                nodes.setdefault((True, b, j // uplinks), len(nodes)),
            )
        )
    colours = [0] * len(edges)
    # Halving keeps the largest degree within the number of colours as long as that is even.
    todo = [(list(range(len(edges))), 0, uplinks)]
    while todo:
        some, first, width = todo.pop()
        if width == 1 or not some:
            for e in some:
                colours[e] = first
        elif width % 2:
            _chains(edges, some, first, width, colours)
        else:
            left, right = _halves(edges, some)
            todo += [(left, first, width // 2), (right, first + width // 2, width // 2)]
    return colours


def _halves(edges: Sequence[tuple[int, int]], some: Sequence[int]) -> tuple[list[int], list[int]]:
    """Two halves in which every node has half its edges, rounded up or down (Euler).

    Walks take alternate edges left and right.  Nodes of odd degree are joined to one more node on
    the other side, so that all walks close; the graph is bipartite, so closed walks are even.
    """
    near: dict[int, list[int]] = {}
    ends: dict[int, tuple[int, int]] = {}
    for e in some:
        a, b = ends[e] = edges[e]
        near.setdefault(a, []).append(e)
        near.setdefault(b, []).append(e)
    source_hub, target_hub, dummy = -1, -2, -1
    hubs: dict[int, list[int]] = {source_hub: [], target_hub: []}
    is_source = {edges[e][0] for e in some}
    for node, row in near.items():
        if len(row) % 2:
            hub = target_hub if node in is_source else source_hub
            ends[dummy] = (node, hub)
            row.append(dummy)
            hubs[hub].append(dummy)
            dummy -= 1
    if len(hubs[source_hub]) % 2:  # then the other is odd, too: both sides have as many edges
        ends[dummy] = (source_hub, target_hub)
        hubs[source_hub].append(dummy)
        hubs[target_hub].append(dummy)
    near.update(hubs)
    left: list[int] = []
    right: list[int] = []
    used: set[int] = set()
    for start, row in near.items():
        while row:
            node, turn = start, False
            while near[node]:
                e = near[node].pop()
                if e in used:
                    continue
                used.add(e)
                if e >= 0:
                    (right if turn else left).append(e)
                turn = not turn
                a, b = ends[e]
                node = b if node == a else a
    return left, right


def _chains(
    edges: Sequence[tuple[int, int]],
    some: Sequence[int],
    first: int,
    width: int,
    colours: list[int],
) -> None:
    """Colour edge by edge; where no colour is free at both ends, swap two along a chain."""
    at: dict[int, list[int]] = {}
    for e in some:
        for node in edges[e]:
            at.setdefault(node, [-1] * width)
    for e in some:
        a, b = edges[e]
        row, other = at[a], at[b]
        colour = next((c for c in range(width) if row[c] < 0 and other[c] < 0), None)
        if colour is None:
            colour = row.index(-1)
            spare = other.index(-1)
            # b has `colour`, a does not: the chain from b that alternates the two misses a.
            node, want, chain = b, colour, []
            while (f := at[node][want]) >= 0:
                chain.append(f)
                node = edges[f][1] if edges[f][0] == node else edges[f][0]
                want = spare if want == colour else colour
            for f in chain:
                for node in edges[f]:
                    if at[node][colours[f] - first] == f:
                        at[node][colours[f] - first] = -1
            for f in chain:
                colours[f] = first + (spare if colours[f] - first == colour else colour)
                for node in edges[f]:
                    at[node][colours[f] - first] = f
        colours[e] = first + colour
        at[a][colour] = at[b][colour] = e


def reassign(
    flows: Sequence[tuple[int, int]],
    uplinks: int,
    down: Iterable[tuple[int, int]] = (),
) -> list[int]:
    """The same where some links (leaf, uplink) are down; each flow needs both of its links.

    Even is then a matter of search: each flow takes the path whose fuller link is emptiest, those
    with least choice first, and flows are moved off the fullest links as long as that helps.
    Without links down it is `assign`.  Raises UsageError for a flow without any path.
    """
    lost = set(down)
    if not lost:
        return assign(flows, uplinks)
    usable = [
        [u for u in range(uplinks) if (a, u) not in lost and (b, u) not in lost] for a, b in flows
    ]
    for (a, b), some in zip(flows, usable, strict=True):
        if not some:
            raise UsageError(f"no uplink joins leaves {a} and {b}: every one is down at either")
    up: dict[tuple[int, int], int] = {}
    below: dict[tuple[int, int], int] = {}
    chosen = [-1] * len(flows)

    def cost(e: int, u: int) -> tuple[int, int]:
        a, b = flows[e]
        x, y = up.get((a, u), 0), below.get((b, u), 0)
        return max(x, y), x + y

    def put(e: int, u: int, by: int) -> None:
        a, b = flows[e]
        up[a, u] = up.get((a, u), 0) + by
        below[b, u] = below.get((b, u), 0) + by
        chosen[e] = u

    for e in sorted(range(len(flows)), key=lambda e: len(usable[e])):
        put(e, min(usable[e], key=lambda u: (cost(e, u), u)), 1)
    for _ in range(4):
        moved = False
        for e in range(len(flows)):
            here = chosen[e]
            put(e, here, -1)
            there = min(usable[e], key=lambda u: (cost(e, u), u != here, u))
            put(e, there, 1)
            moved |= there != here
        if not moved:
            break
    return chosen


# --- Ports that realise it -------------------------------------------------------------------


def choose_ports(
    flows: Sequence[FiveTuple],
    wanted: Sequence[int],
    models: Sequence[Hash],
    ports: range = range(49152, 65536),
) -> list[int]:
    """A source port for each flow by which its leaf's hash takes the wanted uplink.

    models[i] is the hash of flow i's leaf.  Ports are not used twice by one pair of addresses and
    destination port.  Raises UsageError, naming the flow, if no port of the range leads there.
    """
    taken: dict[tuple[str, str, int], set[int]] = {}
    chosen: list[int] = []
    for number, (flow, want, model) in enumerate(zip(flows, wanted, models, strict=True)):
        used = taken.setdefault((flow.source, flow.destination, flow.destination_port), set())
        port = next(
            (p for p in ports if p not in used and model.path(flow.with_source_port(p)) == want),
            None,
        )
        if port is None:
            raise UsageError(
                f"flow {number}, {flow.source} to {flow.destination}: no source port of "
                f"{ports.start} to {ports.stop - 1} leads to uplink {want}; widen the range, or "
                "probe more ports"
            )
        used.add(port)
        chosen.append(port)
    return chosen


# --- Advice ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """A setting to leave or to try.  kind: "keep" is safe as it is, "measure" is an A/B run."""

    kind: str
    settings: tuple[tuple[str, str], ...]
    reason: str


def advice(
    *,
    fabric: str,
    tiers: int,
    flows: int = 0,
    uplinks: int = 0,
    hash_known: bool = False,
    ports_settable: bool = False,
) -> list[Advice]:
    """What to do about collisions.

    fabric    "roce", "tcp", "infiniband" or "infiniband-adaptive"
    tiers     switch tiers that the flows cross: 1 within a leaf, 2 over spines, 3 over cores
    flows, uplinks  of the busiest leaf group and rail, where known: for the expected gain

    Raises UsageError for another fabric or a number of tiers below 1.
    """
    known = ("roce", "tcp", "infiniband", "infiniband-adaptive")
    if fabric not in known or tiers < 1:
        raise UsageError(
            f"fabric {fabric!r}, {tiers} tiers: expected one of {', '.join(known)}, and 1 or more"
        )
    qps = "NCCL_IB_QPS_PER_CONNECTION"
    if tiers == 1:
        return [
            Advice(
                "keep",
                ((qps, "1"),),
                "these flows stay under one switch: there is one path and nothing to hash, more "
                "queue pairs only cost memory and messages",
            )
        ]
    if fabric == "infiniband-adaptive":
        return [
            Advice(
                "keep",
                ((qps, "1"),),
                "adaptive routing chooses a port for every packet: flows do not collide by hash; "
                "check that it is on for the service level in use (NCCL_IB_SL, "
                "NCCL_IB_ADAPTIVE_ROUTING)",
            )
        ]
    if fabric == "infiniband":
        return [
            Advice(
                "measure",
                ((qps, "1"), (qps, "4")),
                "static routes go by destination: queue pairs of one destination share a path "
                "unless the subnet manager gives it several LIDs (LMC); measure before changing",
            )
        ]
    made: list[Advice] = []
    if hash_known and ports_settable:
        made.append(
            Advice(
                "keep",
                (),
                "the hash is known and source ports can be set: assign flows to uplinks and choose "
                "ports, at most ceil(flows / uplinks) on one",
            )
        )
    if fabric == "tcp":
        settings = (("NCCL_SOCKET_NTHREADS", "1"), ("NCCL_NSOCKS_PERTHREAD", "4"))
        made.append(
            Advice(
                "measure",
                settings,
                "several sockets a connection hash apart; " + _expectation(flows, uplinks, 4),
            )
        )
        return made
    made.append(
        Advice(
            "measure",
            ((qps, "1"), (qps, "2"), (qps, "4"), (qps, "8")),
            "above the first tier the switch hashes the source port, which follows from the "
            "queue-pair numbers: more queue pairs are more, smaller flows; "
            + _expectation(flows, uplinks, 4),
        )
    )
    made.append(
        Advice(
            "measure",
            (("NCCL_IB_SPLIT_DATA_ON_QPS", "0"), ("NCCL_IB_SPLIT_DATA_ON_QPS", "1")),
            "with several queue pairs: 0 uses them in turn, message by message, so that small "
            "operations use few of them; 1 splits each message, at the cost of smaller messages",
        )
    )
    made.append(
        Advice(
            "measure",
            (("NCCL_CROSS_NIC", "0"), ("NCCL_CROSS_NIC", "2")),
            "0 keeps a ring on one rail: on a rail-optimised fabric flows of one leaf group then "
            "stay under their leaf",
        )
    )
    if uplinks and flows:
        made.append(
            Advice(
                "measure",
                (),
                f"uplinks of twice a NIC's rate (one port split into two) carry two flows each: "
                f"P(some uplink is overloaded) falls from {conflict(flows, uplinks):.2f} to "
                f"{conflict(flows, uplinks, 2):.2f} for {flows} flows over {uplinks}",
            )
        )
    return made


def _expectation(flows: int, uplinks: int, times: int) -> str:
    if not flows or not uplinks:
        return "the gain depends on flows and uplinks, which are not known here"
    before = expected_fullest(flows, uplinks)
    after = expected_fullest(flows * times, uplinks) / times
    return (
        f"expected on the fullest of {uplinks} uplinks if the hash is even: {before:.2f} of "
        f"{flows} flows, {after:.2f} with {times} times as many (an estimate: measure)"
    )
