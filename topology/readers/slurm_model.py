"""Switches and blocks as Slurm names them -> Fabric: shared by topology.conf and topology.yaml."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from commkit.errors import NoTopology, TopologyError, UsageError
from commkit.topology.build import Builder
from commkit.topology.fabric import Fabric, Nic
from commkit.topology.hostlist import compress, expand

MAX_NAME = 64
#: What topograph calls the switch of nodes without information.
NO_TOPOLOGY = "no-topology"


class Places(Protocol):
    """Whatever can say where something stands: a Source by offsets, a Document by paths."""

    def error(self, at: Any, message: str) -> TopologyError: ...

    def position(self, at: Any) -> tuple[int, int]: ...

    def nothing(self, message: str) -> NoTopology: ...


@dataclass(frozen=True)
class SwitchLine:
    """One switch; `at` and `switches_at` are places, for errors."""

    name: str
    at: Any
    nodes: Sequence[str] = ()
    switches: Sequence[str] = ()
    switches_at: Any = None
    link_speed: int | None = None


@dataclass(frozen=True)
class BlockLine:
    name: str
    at: Any
    nodes: Sequence[str] = ()


def tree(places: Places, found: Sequence[SwitchLine]) -> Fabric:
    """A fabric of switch lines in any order."""
    build = Builder()
    seen: dict[str, SwitchLine] = {}
    for line in found:
        if line.name in seen:
            first = places.position(seen[line.name].at)[0]
            raise places.error(
                line.at, f"duplicate switch {line.name}: it was defined on line {first}"
            )
        seen[line.name] = line
    for line in found:
        for child in line.switches:
            if child == line.name:
                raise places.error(line.switches_at, f"switch {child} is its own child")
            if child not in seen:
                raise places.error(
                    line.switches_at,
                    f"unknown child {child} of {line.name}: {_hint(line, seen)}",
                )
    _check_acyclic(places, seen)
    real = [line for line in found if line.name != NO_TOPOLOGY]
    index = {line.name: build.switch(line.name, link_speed=line.link_speed) for line in real}
    for line in found:
        for node in line.nodes:
            build.host(node)
            if line.name in index:
                build.attach(node, Nic(switch=index[line.name]))
        for child in line.switches:
            if child in index and line.name in index:
                build.link(index[child], index[line.name])
    _note_nodes(build, found)
    return _with_hosts(places, build.tree())


def block(places: Places, found: Sequence[BlockLine], sizes: Sequence[int]) -> Fabric:
    """Blocks, and the larger units of `sizes` that consecutive blocks form in file order.

    A unit of size s holds s / sizes[0] blocks, whatever the number of their nodes.
    """
    build = Builder()
    names = [line.name for line in found]
    seen: dict[str, Any] = {}
    for line in found:
        if line.name in seen:
            first = places.position(seen[line.name])[0]
            raise places.error(line.at, f"duplicate block {line.name}: it was on line {first}")
        seen[line.name] = line.at
        if sizes and 0 < len(line.nodes) < sizes[0]:
            build.notes.append(
                f"block {line.name} has {len(line.nodes)} nodes, fewer than the base block "
                f"size {sizes[0]}: Slurm refuses that"
            )
    below = [build.switch(name, 0, "block") for name in names]
    for line, here in zip(found, below, strict=True):
        for node in line.nodes:
            build.attach(node, Nic(switch=here))
    units = [(here, [name]) for here, name in zip(below, names, strict=True)]
    layer = 0
    for smaller, size in itertools.pairwise(sizes):
        if size == smaller:
            continue
        layer, factor = layer + 1, size // smaller
        units = [_unit(build, units[i : i + factor], layer) for i in range(0, len(units), factor)]
    _note_nodes(build, found)
    return replace(_with_hosts(places, build.tree()), block_sizes=tuple(sizes), joined=True)


def check_sizes(sizes: Sequence[int]) -> str:
    """What is wrong with BlockSizes, "" if nothing: each a power of two times the first."""
    for size in sizes:
        if size < 1:
            return f"{size}: expected sizes above 0"
        factor, rest = divmod(size, sizes[0])
        if rest or factor & (factor - 1) or factor > 1 << 15:
            return f"{size}: expected {sizes[0]} times a power of two"
    if list(sizes) != sorted(sizes):
        return f"{','.join(map(str, sizes))}: expected the smallest first"
    return ""


def host_list(places: Places, text: str, at: Any) -> list[str]:
    """Names of a host list; "" is none."""
    if not text.strip():
        return []
    try:
        return expand(text)
    except UsageError as error:
        raise places.error(at, str(error)) from None


def check_name(places: Places, name: str, at: Any) -> str:
    if not name:
        raise places.error(at, "an empty name: expected a switch's or block's name")
    if len(name) > MAX_NAME:
        raise places.error(
            at,
            f"name too long: {name[:16]}... has {len(name)} characters, "
            f"expected at most {MAX_NAME}",
        )
    return name


def _hint(line: SwitchLine, seen: dict[str, SwitchLine]) -> str:
    brackets = [name for name in seen if "[" in name]
    if brackets:
        return (
            f"a SwitchName is a plain name and never a host list, so {brackets[0]} is one switch "
            "of that very name; write a line for each"
        )
    return "expected the name of a SwitchName line"


def _check_acyclic(places: Places, seen: dict[str, SwitchLine]) -> None:
    done: set[str] = set()
    for start in seen:
        trail: dict[str, Iterator[str]] = {}
        here: str | None = start
        while here is not None:
            if here not in trail:
                if here in done:
                    here = next(reversed(trail), None)
                    continue
                trail[here] = iter(seen[here].switches)
            child = next(trail[here], None)
            if child is None:
                done.add(here)
                del trail[here]
                here = next(reversed(trail), None)
            elif child in trail:
                names = list(trail)
                around = names[names.index(child) :]
                cycle = ",".join(around[:8]) + (",..." if len(around) > 8 else "")
                raise places.error(seen[child].switches_at, f"not a tree (cycle {cycle})")
            else:
                here = child


def _unit(
    build: Builder, parts: Sequence[tuple[int, list[str]]], layer: int
) -> tuple[int, list[str]]:
    """The unit of several blocks or units; one that is left over at the end stays what it is."""
    if len(parts) == 1:
        return parts[0]
    members = [name for _, names in parts for name in names]
    try:
        name = compress(members)
    except UsageError:  # blocks may be called what no host list can hold
        name = f"{members[0]}...{members[-1]}"
    while build.has_switch(name):
        name += "+"
    unit = build.switch(name, layer, "blocks")
    for part, _ in parts:
        build.link(part, unit)
    return unit, members


def _note_nodes(build: Builder, found: Sequence[SwitchLine | BlockLine]) -> None:
    times: dict[str, int] = {}
    for line in found:
        for node in dict.fromkeys(line.nodes):
            times[node] = times.get(node, 0) + 1
        if line.name == NO_TOPOLOGY and line.nodes:
            build.notes.append(
                f"switch {NO_TOPOLOGY} holds {len(line.nodes)} nodes of which nothing is known"
            )
    several = [node for node, count in times.items() if count > 1]
    if several:
        some = ", ".join(several[:4]) + (", ..." if len(several) > 4 else "")
        build.notes.append(f"{len(several)} nodes are on several leaves: {some}")


def _with_hosts(places: Places, fabric: Fabric) -> Fabric:
    if not fabric.hosts:
        raise places.nothing(f"{len(fabric.switches)} switches, and none has Nodes")
    return fabric
