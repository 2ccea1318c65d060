"""Volcano's HyperNodes: groups of nodes (tier 1) and groups of groups.

Members are chosen by exact name, by a regular expression over names, or by labels; the latter two
need the Nodes in the same file.  https://volcano.sh: network topology aware scheduling.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from commkit.errors import TopologyError
from commkit.topology.build import Builder
from commkit.topology.fabric import Fabric, Nic
from commkit.topology.readers.document import Document, Path


def hypernodes(
    doc: Document,
    found: Sequence[tuple[Path, dict[str, Any]]],
    nodes: Mapping[str, Mapping[str, str]],
) -> Fabric:
    """`nodes`: labels by the name of the node.  Raises TopologyError, NoTopology."""
    build = Builder()
    index: dict[str, int] = {}
    specs: list[tuple[str, Path, dict[str, Any]]] = []
    for path, entry in found:
        metadata = doc.mapping(entry.get("metadata"), (*path, "metadata"), "metadata")
        where = (*path, "metadata", "name")
        name = doc.name(metadata.get("name"), where, "the HyperNode's name")
        if name in index:
            raise doc.error(where, f"duplicate HyperNode {name}")
        spec = doc.mapping(entry.get("spec"), (*path, "spec"), "spec")
        tier = doc.number(spec.get("tier"), (*path, "spec", "tier"), "tier")
        kind = doc.optional_name(spec, "tierName", (*path, "spec"))
        index[name] = build.switch(name, kind=kind or f"tier {tier}")
        specs.append((name, (*path, "spec"), spec))
    unknown: list[str] = []
    for name, path, spec in specs:
        path = (*path, "members")
        for i, item in enumerate(doc.sequence(spec.get("members") or [], path, "members")):
            here = (*path, i)
            member = doc.mapping(item, here, "a member")
            pool = index if member.get("type") == "HyperNode" else nodes
            for chosen in _members(doc, member, here, pool, unknown):
                if pool is not index:
                    build.attach(chosen, Nic(switch=index[name]))
                elif chosen not in index:
                    raise doc.error(here, f"HyperNode {chosen} of {name} is not in this file")
                elif chosen == name:
                    raise doc.error(here, f"HyperNode {name} is its own member")
                else:
                    build.link(index[chosen], index[name])
    if unknown:
        some = ", ".join(dict.fromkeys(unknown[:4]))
        build.notes.append(f"no Nodes in this file: members chosen by {some} are unknown")
    for name in nodes:
        build.host(name)
    try:
        fabric = build.tree()
    except TopologyError as error:
        raise doc.error(found[0][0], str(error)) from None
    if not fabric.hosts:
        raise doc.nothing("HyperNodes without any known node")
    return fabric


def _members(
    doc: Document,
    member: dict[str, Any],
    path: Path,
    pool: Mapping[str, Any],
    unknown: list[str],
) -> list[str]:
    """Names that a selector chooses."""
    path = (*path, "selector")
    selector = doc.mapping(member.get("selector"), path, "selector")
    kinds = [key for key in ("exactMatch", "regexMatch", "labelMatch") if selector.get(key)]
    if len(kinds) != 1:
        raise doc.error(path, "expected exactly one of exactMatch, regexMatch, labelMatch")
    path = (*path, kinds[0])
    how = doc.mapping(selector[kinds[0]], path, kinds[0])
    if kinds[0] == "exactMatch":
        return [doc.name(how.get("name"), (*path, "name"), "name")]
    if kinds[0] == "regexMatch":
        text = doc.name(how.get("pattern"), (*path, "pattern"), "pattern")
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise doc.error((*path, "pattern"), f"pattern {text!r}: {error}") from None
        if not pool:
            unknown.append(text)
        return [name for name in pool if pattern.search(name)]
    wanted = doc.mapping(how.get("matchLabels") or {}, (*path, "matchLabels"), "matchLabels")
    if how.get("matchExpressions"):
        raise doc.error(
            (*path, "matchExpressions"), "matchExpressions are not supported: expected matchLabels"
        )
    if not pool:
        unknown.append(",".join(f"{key}={value}" for key, value in wanted.items()))
    return [
        name
        for name, labels in pool.items()
        if isinstance(labels, Mapping)
        and all(labels.get(key) == str(value) for key, value in wanted.items())
    ]
