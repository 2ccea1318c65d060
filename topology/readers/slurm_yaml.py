"""Slurm's topology.yaml: several named topologies, of which one is the cluster's.

Kinds that are no tree of switches (flat, ring, torus3d) are listed as skipped.
Manual: topology.yaml(5).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from commkit.topology.fabric import Fabric
from commkit.topology.readers.document import Document, Path, parse
from commkit.topology.readers.slurm_model import (
    BlockLine,
    SwitchLine,
    block,
    check_name,
    check_sizes,
    host_list,
    tree,
)
from commkit.topology.readers.source import Source

KINDS = ("tree", "block", "flat", "ring", "torus3d")
_TRUE = ("true", "yes", "on", "1")


def read(source: Source, choose: str | None = None) -> Fabric:
    """The topology named `choose`, else the first with cluster_default, else the only one."""
    doc = parse(source)
    if not doc.data:
        raise source.nothing("the file is empty")
    entries = doc.sequence(doc.data[0], (0,), "a list of topologies")
    if not entries:
        raise source.nothing("no topology is configured")
    kinds: dict[str, tuple[int, str]] = {}
    default = ""
    for i, value in enumerate(entries):
        entry = doc.mapping(value, (0, i), "a topology")
        name = doc.name(entry.get("topology"), (0, i, "topology"), "the topology's name")
        if name in kinds:
            raise doc.error((0, i, "topology"), f"duplicate topology {name}")
        own = [key for key in entry if key not in ("topology", "cluster_default")]
        if len(own) != 1:
            found = ", ".join(own) or "none"
            raise doc.error(
                (0, i), f"topology {name}: {found}: expected exactly one of {', '.join(KINDS)}"
            )
        kinds[name] = i, own[0]
        if not default and str(entry.get("cluster_default", "")).lower() in _TRUE:
            default = name
    chosen = _choose(source, doc, kinds, default, choose)
    index, kind = kinds[chosen]
    path: Path = (0, index, kind)
    if kind == "flat":
        raise source.nothing(f"topology {chosen} is flat")
    if kind not in ("tree", "block"):
        raise doc.error(
            path, f"topology {chosen}: kind {kind!r} is not supported: expected tree, block"
        )
    body = doc.mapping(entries[index][kind], path, f"{kind}")
    fabric = _tree(doc, body, path) if kind == "tree" else _block(doc, body, path)
    others = [f"{name} ({kind})" for name, (_, kind) in kinds.items() if name != chosen]
    if not others:
        return fabric
    note = f"topology {chosen} was read, these were skipped: {', '.join(others)}"
    return replace(fabric, notes=(note, *fabric.notes))


def _choose(
    source: Source,
    doc: Document,
    kinds: dict[str, tuple[int, str]],
    default: str,
    choose: str | None,
) -> str:
    if choose is not None:
        if choose not in kinds:
            raise doc.error((0,), f"no topology {choose!r}: expected one of {', '.join(kinds)}")
        return choose
    if default:
        return default
    if len(kinds) > 1:
        raise doc.error((0,), f"none is cluster_default: choose one of {', '.join(kinds)} (--name)")
    return next(iter(kinds))


def _hosts(doc: Document, entry: dict[str, Any], key: str, path: Path) -> list[str]:
    value = entry.get(key)
    if value is None or value == "":
        return []
    path = (*path, key)
    return host_list(doc, doc.name(value, path, key), path)


def _tree(doc: Document, body: dict[str, Any], path: Path) -> Fabric:
    path = (*path, "switches")
    found: list[SwitchLine] = []
    for i, value in enumerate(doc.sequence(body.get("switches"), path, "switches")):
        here = (*path, i)
        entry = doc.mapping(value, here, "a switch")
        _only(doc, entry, here, ("switch", "children", "nodes"))
        name = doc.name(entry.get("switch"), (*here, "switch"), "the switch's name")
        check_name(doc, name, (*here, "switch"))
        nodes = _hosts(doc, entry, "nodes", here)
        children = _hosts(doc, entry, "children", here)
        if nodes and children:
            raise doc.error(here, f"switch {name} has both nodes and children: expected one")
        found.append(SwitchLine(name, (*here, "switch"), nodes, children, (*here, "children")))
    if not found:
        raise doc.nothing("no switches are configured")
    return tree(doc, found)


def _block(doc: Document, body: dict[str, Any], path: Path) -> Fabric:
    where = (*path, "block_sizes")
    value = body.get("block_sizes")
    sizes: list[int] = []
    if value not in (None, ""):
        items = doc.sequence(value, where, "block_sizes")
        sizes = [doc.number(v, (*where, i), "a block size") for i, v in enumerate(items)]
    if wrong := check_sizes(sizes):
        raise doc.error(where, f"block_sizes: {wrong}")
    path = (*path, "blocks")
    found: list[BlockLine] = []
    for i, value in enumerate(doc.sequence(body.get("blocks"), path, "blocks")):
        here = (*path, i)
        entry = doc.mapping(value, here, "a block")
        _only(doc, entry, here, ("block", "nodes"))
        name = doc.name(entry.get("block"), (*here, "block"), "the block's name")
        check_name(doc, name, (*here, "block"))
        found.append(BlockLine(name, (*here, "block"), _hosts(doc, entry, "nodes", here)))
    if not found:
        raise doc.nothing("no blocks are configured")
    return block(doc, found, sizes)


def _only(doc: Document, entry: dict[str, Any], path: Path, keys: tuple[str, ...]) -> None:
    for key in entry:
        if key not in keys:
            raise doc.error((*path, key), f"unknown key {key}: expected {', '.join(keys)}")
