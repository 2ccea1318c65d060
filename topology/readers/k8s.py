"""Kubernetes objects, as `kubectl get nodes -o json` (or yaml) prints them.

Nodes carry the fabric in labels.  Which ones count, first come first served: the levels of a Kueue
`Topology` in the same file (the name of one of several is chosen), else the first family below of
which any node has a label.  Volcano's HyperNodes are a tree of their own: volcano.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from commkit.topology.build import Place, from_places
from commkit.topology.fabric import Fabric
from commkit.topology.readers.document import Document, Path, parse
from commkit.topology.readers.source import Source
from commkit.topology.readers.topograph import DOMAIN_LABELS
from commkit.topology.readers.volcano import hypernodes

HOSTNAME = "kubernetes.io/hostname"
#: Labels nearest first.  A pattern stands for as many levels as there are, in the order given.
FAMILIES: tuple[tuple[str, ...], ...] = (
    (
        "network.topology.nvidia.com/leaf",
        "network.topology.nvidia.com/spine",
        "network.topology.nvidia.com/core",
    ),
    (
        "network.topology.nvidia.com/block",
        "network.topology.nvidia.com/spine",
        "network.topology.nvidia.com/datacenter",
    ),
    ("cloud.google.com/gce-topology-subblock", "cloud.google.com/gce-topology-block"),
    ("oci.oraclecloud.com/host.rack_id", "oci.oraclecloud.com/host.network_block_id"),
    ("topology.kubernetes.io/rack", "topology.kubernetes.io/block", "topology.kubernetes.io/zone"),
)
#: prefix of numbered labels -> whether 0 is nearest
NUMBERED = {
    "fabric.topograph.run/tier-": True,
    "topology.k8s.aws/network-node-layer-": False,
}
DOMAINS = (*DOMAIN_LABELS, "nvidia.com/gpu.clique", "topology.k8s.aws/ultraserver-id")


def read(source: Source, choose: str | None = None) -> Fabric:
    doc = parse(source)
    objects = list(_objects(doc))
    nodes = [(*_named(doc, path, entry), path) for path, kind, entry in objects if kind == "Node"]
    labels = {name: held for name, held, _ in nodes}
    hyper = [(path, entry) for path, kind, entry in objects if kind == "HyperNode"]
    if hyper:
        return hypernodes(doc, hyper, labels)
    if not nodes:
        raise source.nothing("no Node and no HyperNode")
    topologies = {
        doc.name(
            doc.mapping(entry.get("metadata"), (*path, "metadata"), "metadata").get("name"),
            (*path, "metadata", "name"),
            "the topology's name",
        ): (path, entry)
        for path, kind, entry in objects
        if kind == "Topology"
    }
    keys = _levels(doc, topologies, choose) or _family(labels.values())
    if not keys:
        raise source.nothing(
            "no known topology label on any of "
            f"{len(nodes)} nodes (fabric.topograph.run/tier-N, network.topology.nvidia.com/..., "
            "topology.k8s.aws/..., cloud.google.com/..., or a Kueue Topology in the same file)"
        )
    places = [
        Place(
            name,
            tuple(held.get(key) or None for key in keys),
            tuple(_short(key) for key in keys),
            domain=next((held[key] for key in DOMAINS if held.get(key)), None),
        )
        for name, held in labels.items()
    ]
    bare = sum(not any(place.names) for place in places)
    notes = [f"{bare} nodes have none of the labels {', '.join(keys)}"] if bare else []
    return from_places(places, fixed=True, notes=notes)


def _objects(doc: Document) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    for d, value in enumerate(doc.data):
        top = doc.mapping(value, (d,), "a Kubernetes object")
        if isinstance(top.get("items"), list):
            # The items of a NodeList need not say that they are nodes.
            kind = str(top.get("kind") or "List").removesuffix("List")
            for i, item in enumerate(top["items"]):
                entry = doc.mapping(item, (d, "items", i), "an object")
                yield (d, "items", i), str(entry.get("kind") or kind), entry
        else:
            yield (d,), str(top.get("kind") or ""), top


def _named(doc: Document, path: Path, entry: dict[str, Any]) -> tuple[str, dict[str, str]]:
    path = (*path, "metadata")
    metadata = doc.mapping(entry.get("metadata"), path, "metadata")
    name = doc.name(metadata.get("name"), (*path, "name"), "the node's name")
    held = doc.mapping(metadata.get("labels") or {}, (*path, "labels"), "labels")
    return name, {key: str(value) for key, value in held.items()}


def _levels(
    doc: Document, topologies: dict[str, tuple[Path, dict[str, Any]]], choose: str | None
) -> list[str]:
    """Labels of a Kueue Topology, nearest first; the host's own label is no level."""
    if choose is not None and choose not in topologies:
        names = ", ".join(topologies) or "none in this file"
        raise doc.error((0,), f"no Topology {choose!r}: expected one of: {names}")
    if not topologies:
        return []
    if choose is None and len(topologies) > 1:
        raise doc.error((0,), f"several Topologies: choose one of {', '.join(topologies)} (--name)")
    path, entry = topologies[choose or next(iter(topologies))]
    spec = doc.mapping(entry.get("spec"), (*path, "spec"), "spec")
    path = (*path, "spec", "levels")
    keys = [
        doc.name(
            doc.mapping(level, (*path, i), "a level").get("nodeLabel"),
            (*path, i, "nodeLabel"),
            "nodeLabel",
        )
        for i, level in enumerate(doc.sequence(spec.get("levels"), path, "levels"))
    ]
    return [key for key in reversed(keys) if key != HOSTNAME]


def _family(labels: Any) -> list[str]:
    present = {key for held in labels for key, value in held.items() if value}
    for prefix, ascending in NUMBERED.items():
        found = [key for key in present if re.fullmatch(re.escape(prefix) + r"\d+", key)]
        if found:
            return sorted(found, key=lambda k: int(k[len(prefix) :]), reverse=not ascending)
    for family in FAMILIES:
        if family[0] in present:
            return [key for key in family if key in present]
    for family in FAMILIES:
        if some := [key for key in family if key in present]:
            return some
    return []


def _short(key: str) -> str:
    return key.rpartition("/")[2]
