"""What probes have told -> uplinks, the hash behind them, and which planned flows meet on one.

A measurement is a flow and the address of the router that answered at the hop where paths part.
Most routers answer from their end of the cable, so that an address stands for one uplink of one
leaf, and hosts that see the same addresses are under one leaf.  Uplinks have no numbers here: they
are counted in the order of their addresses, and models fit up to the numbering.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from commkit.errors import UsageError
from commkit.topology.ecmp import (
    FiveTuple,
    Hash,
    Linux,
    Probed,
    chips,
    fit,
    linear_shifts,
)
from commkit.topology.paths import assign, choose_ports

#: A model counts as found if chance would explain the measurements less often than this.
CHANCE = 1e-6
#: Of every JSON file of measurements.
FORMAT = "commkit-paths/1"


@dataclass(frozen=True)
class Renumbered:
    """A model whose paths are called otherwise: `numbers[model's path]` is the uplink."""

    model: Hash
    numbers: Mapping[int, int]

    def path(self, flow: FiveTuple) -> int | None:
        path = self.model.path(flow)
        return None if path is None else self.numbers.get(path)


@dataclass(frozen=True)
class Leaf:
    """The uplinks of one leaf as its hosts see them.

    uplinks   addresses of the routers' ends, in their order
    paths     flow -> index of its uplink, measured
    known     the hash: fitted, or the measurements and what their linearity tells of other ports
    name      of the hash, or "unknown"
    why       what there is to say about it
    """

    uplinks: tuple[str, ...]
    paths: Mapping[FiveTuple, int]
    known: Hash
    name: str
    why: str = ""

    @functools.cached_property
    def sources(self) -> frozenset[str]:
        """Addresses of the hosts that have measured."""
        return frozenset(flow.source for flow in self.paths)


@dataclass(frozen=True)
class Planned:
    """Planned flows on a leaf's uplinks.

    flows     uplink -> flows that take it
    unknown   flows of which nobody knows which one they take
    even      what the fullest uplink would carry if flows were spread evenly
    ports     planned flow -> a source port that spreads them; empty where none is needed or known
    """

    leaf: Leaf
    flows: tuple[tuple[FiveTuple, ...], ...]
    unknown: tuple[FiveTuple, ...]
    even: int
    ports: Mapping[FiveTuple, int] = field(default_factory=dict)

    @property
    def fullest(self) -> int:
        return max(map(len, self.flows), default=0)

    @property
    def collides(self) -> bool:
        return self.fullest > self.even


def leaves_of(
    answers: Mapping[FiveTuple, str], candidates_of: Candidates | None = None
) -> list[Leaf]:
    """Leaves from measurements of any number of hosts: flow -> address that answered."""
    near: dict[str, set[str]] = {}
    for flow, by in answers.items():
        near.setdefault(flow.source, set()).add(by)
    parts: list[tuple[set[str], set[str]]] = []
    for source, some in near.items():
        merged = ({source}, set(some))
        rest = []
        for part in parts:
            if part[1] & some:
                merged[0].update(part[0])
                merged[1].update(part[1])
            else:
                rest.append(part)
        parts = [*rest, merged]
    found = []
    for sources, some in parts:
        uplinks = tuple(sorted(some, key=lambda text: ipaddress.ip_address(text).packed))
        index = {address: i for i, address in enumerate(uplinks)}
        paths = {flow: index[by] for flow, by in answers.items() if flow.source in sources}
        found.append(_leaf(uplinks, paths, candidates_of or Candidates()))
    return sorted(found, key=lambda leaf: ipaddress.ip_address(leaf.uplinks[0]).packed)


@dataclass(frozen=True)
class Candidates:
    """Hashes to try.  seeds: of Linux, and of switch chips beside 0 and all ones."""

    seeds: tuple[int, ...] = ()

    def of(self, uplinks: int) -> list[tuple[str, Hash]]:
        made: list[tuple[str, Hash]] = []
        for seed in self.seeds:
            for policy in (3, 1):
                model = Linux(seed, (1,) * uplinks, policy)
                made.append((f"Linux, seed {seed}, policy {policy}", model))
        # Where the number of uplinks is a power of two, a chip's seed only renumbers them.
        seeds = [0, 0xFFFFFFFF, *self.seeds] if uplinks & (uplinks - 1) else [0]
        for chip in chips(uplinks, list(dict.fromkeys(seeds))):
            made.append((f"chip, {_words(chip)}", chip))
        return made


def _words(model: Any) -> str:
    return f"{model.algorithm}, seed {model.seed}, offset {model.offset}"


def _leaf(uplinks: tuple[str, ...], paths: Mapping[FiveTuple, int], candidates: Candidates) -> Leaf:
    measured = Probed(paths)
    count = len(uplinks)
    if count == 1:
        return Leaf(uplinks, paths, measured, "one path", "every flow takes the same uplink")
    tried = candidates.of(count)
    fitting = fit(paths, [model for _, model in tried])
    # The share of wrong models that explain as much by chance, numbering left open.
    chance = len(tried) * math.factorial(min(count, 100)) * float(count) ** -len(paths)
    if fitting and chance < CHANCE:
        names = [name for name, model in tried if model in fitting]
        more = f"{len(names) - 1} others explain as much" if len(names) > 1 else ""
        return Leaf(uplinks, paths, _renumbered(fitting[0], paths), names[0], more)
    if fitting:
        why = f"{len(fitting)} of {len(tried)} models fit {len(paths)} flows: probe more ports"
        return Leaf(uplinks, paths, measured, "unknown", why)
    # Of 3 or 5 uplinks (one is silent?) an exclusive or can lead to one that has no number.
    shifts = {} if count & (count - 1) else linear_shifts(paths)
    why = f"none of {len(tried)} models explains {len(paths)} flows"
    if shifts:
        why += f"; it is linear: {len(shifts)} changes of the source port move every flow alike"
    return Leaf(uplinks, paths, Probed(paths, shifts), "unknown", why)


def _renumbered(model: Hash, paths: Mapping[FiveTuple, int]) -> Hash:
    numbers = {}
    for flow, uplink in paths.items():
        path = model.path(flow)
        assert path is not None
        numbers[path] = uplink
    return Renumbered(model, numbers)


def plan(leaf: Leaf, flows: Sequence[FiveTuple], ports: range | None = None) -> Planned:
    """Where planned flows of this leaf's hosts go, and source ports that would spread them.

    ports: those to choose from; None: those that were measured with the same rest of the flow.
    """
    rows: list[list[FiveTuple]] = [[] for _ in leaf.uplinks]
    unknown = []
    for flow in flows:
        path = leaf.known.path(flow)
        if path is None:
            unknown.append(flow)
        else:
            rows[path].append(flow)
    even = -(-(len(flows) - len(unknown)) // len(leaf.uplinks))
    made = Planned(leaf, tuple(map(tuple, rows)), tuple(unknown), even)
    if not made.collides:
        return made
    known = [flow for row in rows for flow in row]
    wanted = assign([(0, 1 + i) for i in range(len(known))], len(leaf.uplinks))
    # Evenly over the uplinks, and as many as can stay where they are.
    wanted = _staying(known, wanted, leaf)
    if ports is None:
        measured = [flow.source_port for flow in leaf.paths]
        ports = range(min(measured), max(measured) + 1)
    try:
        chosen = _choose(known, wanted, leaf, ports)
    except UsageError:
        return made
    return Planned(leaf, made.flows, made.unknown, even, dict(zip(known, chosen, strict=True)))


def _staying(known: Sequence[FiveTuple], wanted: Sequence[int], leaf: Leaf) -> list[int]:
    """The same uplinks as often, dealt out so that flows keep theirs where there is room."""
    room = [list(wanted).count(uplink) for uplink in range(len(leaf.uplinks))]
    given: dict[int, int] = {}
    for i, flow in enumerate(known):
        path = leaf.known.path(flow)
        if path is not None and room[path]:
            room[path] -= 1
            given[i] = path
    left = [uplink for uplink, count in enumerate(room) for _ in range(count)]
    return [given[i] if i in given else left.pop() for i in range(len(known))]


def _choose(
    known: Sequence[FiveTuple], wanted: Sequence[int], leaf: Leaf, ports: range
) -> list[int]:
    """Flows that go where they should keep their port, the others get one."""
    stays = [leaf.known.path(f) == want for f, want in zip(known, wanted, strict=True)]
    kept = {
        (f.source, f.destination, f.destination_port, f.source_port)
        for f, stay in zip(known, stays, strict=True)
        if stay
    }
    moving = [i for i, stay in enumerate(stays) if not stay]
    free = _Without(leaf.known, frozenset(kept))
    chosen = choose_ports(
        [known[i] for i in moving], [wanted[i] for i in moving], [free] * len(moving), ports
    )
    found = [flow.source_port for flow in known]
    for i, port in zip(moving, chosen, strict=True):
        found[i] = port
    return found


@dataclass(frozen=True)
class _Without:
    """A model that does not know flows which are taken."""

    model: Hash
    taken: frozenset[tuple[str, str, int, int]]

    def path(self, flow: FiveTuple) -> int | None:
        key = flow.source, flow.destination, flow.destination_port, flow.source_port
        return None if key in self.taken else self.model.path(flow)


# --- Files -----------------------------------------------------------------------------------


def to_json(answers: Mapping[FiveTuple, str]) -> dict[str, Any]:
    rows = [{**asdict(flow), "by": by} for flow, by in answers.items()]
    return {"format": FORMAT, "paths": rows}


def from_json(text: str, source: str) -> dict[FiveTuple, str]:
    """What another host has written; UsageError with the file and the entry."""
    try:
        plain = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{source}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise UsageError(f'{source}: expected measurements with "format": "{FORMAT}"')
    rows = plain.get("paths")
    if not isinstance(rows, list):
        raise UsageError(f"{source}: paths: expected a list")
    found = {}
    for number, row in enumerate(rows):
        try:
            flow, by = _row(row)
        except (TypeError, KeyError, ValueError, UsageError) as error:
            raise UsageError(f"{source}: paths[{number}]: {error}") from None
        found[flow] = by
    return found


def _row(row: Any) -> tuple[FiveTuple, str]:
    names = ("source", "destination", "protocol", "source_port", "destination_port", "by")
    if not isinstance(row, dict) or set(row) != set(names):
        raise UsageError(f"expected the keys {', '.join(names)}")
    for name in names:
        kind = int if name.endswith("port") or name == "protocol" else str
        if not isinstance(row[name], kind) or isinstance(row[name], bool):
            raise UsageError(
                f"{name}: {row[name]!r}: expected {'a number' if kind is int else 'text'}"
            )
    by = str(ipaddress.ip_address(row["by"]))
    return FiveTuple(*(row[name] for name in names[:-1])), by


def merged(some: Iterable[Mapping[FiveTuple, str]]) -> dict[FiveTuple, str]:
    found: dict[FiveTuple, str] = {}
    for answers in some:
        found.update(answers)
    return found
