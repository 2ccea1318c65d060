"""NetQ's topology graph: switches with their tiers, hosts (tier -1), and cables port by port."""

from __future__ import annotations

from collections import Counter
from typing import Any

from commkit.topology.build import Builder, natural, number_rails
from commkit.topology.fabric import Fabric, Nic
from commkit.topology.readers.document import Document, Path, parse_json
from commkit.topology.readers.source import Source

_SEPARATOR = "-*-"


def read(source: Source) -> Fabric:
    doc = parse_json(source)
    build = Builder()
    for d, value in enumerate(doc.data):
        for g, item in enumerate(doc.sequence(value, (d,), "a list with one graph")):
            _graph(doc, build, doc.mapping(item, (d, g), "a graph"), (d, g))
    fabric = build.graph()
    if not fabric.hosts:
        raise source.nothing("no hosts (nodes of tier -1)")
    return number_rails(fabric)


def _graph(doc: Document, build: Builder, graph: dict[str, Any], path: Path) -> None:
    names, tiers = _nodes(doc, graph, (*path, "nodes"))
    lowest = min((tier for tier in tiers.values() if tier >= 0), default=0)
    switches: dict[str, int] = {}
    for key, tier in tiers.items():
        if tier >= 0:
            switches[key] = build.switch(names[key], tier - lowest, f"tier {tier}")
        else:
            build.host(names[key])
    path = (*path, "links")
    cables: Counter[tuple[int, int]] = Counter()
    for n, link in enumerate(doc.sequence(graph.get("links"), path, "links")):
        here = (*path, n)
        entry = doc.mapping(link, here, "a link")
        id = doc.name(entry.get("id"), (*here, "id"), "the link's id")
        ends = id.split(_SEPARATOR)
        if len(ends) != 2 or not set(ends) <= set(names):
            raise doc.error((*here, "id"), f"{id!r}: expected two nodes' ids around {_SEPARATOR}")
        where: Path = (*here, "compounded_links")
        ports = doc.sequence(entry.get("compounded_links") or [], where, "compounded_links")
        placed = [end for end in ends if end in switches]
        if len(placed) == 2:
            cables[switches[ends[0]], switches[ends[1]]] += max(len(ports), 1)
        elif placed:  # two hosts without a switch in between say nothing about places
            host = next(end for end in ends if end not in switches)
            for name in _interfaces(doc, ports, host, where):
                build.attach(names[host], Nic(name, switches[placed[0]]))
    for (a, b), count in cables.items():
        build.link(a, b, count)


def _nodes(
    doc: Document, graph: dict[str, Any], path: Path
) -> tuple[dict[str, str], dict[str, int]]:
    """Names and tiers of the nodes, by id."""
    names: dict[str, str] = {}
    tiers: dict[str, int] = {}
    for n, item in enumerate(doc.sequence(graph.get("nodes"), path, "nodes")):
        where = (*path, n, "compounded_nodes")
        nodes = doc.mapping(item, (*path, n), "a tier").get("compounded_nodes") or []
        for i, node in enumerate(doc.sequence(nodes, where, "compounded_nodes")):
            here = (*where, i)
            entry = doc.mapping(node, here, "a node")
            key = doc.name(entry.get("id"), (*here, "id"), "the node's id")
            names[key] = doc.name(entry.get("name"), (*here, "name"), "the node's name")
            tiers[key] = doc.number(entry.get("tier"), (*here, "tier"), "tier")
    return names, tiers


def _interfaces(doc: Document, ports: list[Any], host: str, path: Path) -> list[str | None]:
    """The host's interfaces of a link; one without a name where the link lists none."""
    found: list[str] = []
    for p, port in enumerate(ports):
        pair = doc.mapping(port, (*path, p), "a cable").get("interfaces") or []
        for side in doc.sequence(pair, (*path, p, "interfaces"), "interfaces"):
            if isinstance(side, dict) and side.get("node") == host and "interface" in side:
                found.append(str(side["interface"]))
    return [*sorted(found, key=natural)] or [None]
