"""Google Compute Engine instances, as `gcloud compute instances list --format=json` prints them.

resourceStatus.physicalHostTopology names cluster, block, subblock and host; where it is missing,
resourceStatus.physicalHost ("/block/subblock/host") is read.  A physical host counts as a place of
its own only where it holds more than one of the instances.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from commkit.topology.build import Place, from_places
from commkit.topology.fabric import Fabric
from commkit.topology.readers.document import Document, Path, parse
from commkit.topology.readers.source import Source

KINDS = ("host", "subblock", "block", "cluster")


def read(source: Source) -> Fabric:
    doc = parse(source)
    found: list[tuple[str, str, str | None, tuple[str | None, ...]]] = []
    for here, instance in _instances(doc):
        name = doc.name(instance.get("name"), (*here, "name"), "the instance's name")
        zone = str(instance.get("zone") or "").rpartition("/")[2]
        found.append(
            (name, zone, doc.optional_name(instance, "id", here), _chain(doc, instance, here))
        )
    if not found:
        raise source.nothing("no instances")
    shared = Counter(chain for *_, chain in found if chain and chain[0] is not None)
    names = Counter(name for name, *_ in found)
    places: list[Place] = []
    for name, zone, id, chain in found:
        own = chain if chain and shared[chain] > 1 else (None, *chain[1:])
        full = f"{zone}/{name}" if names[name] > 1 and zone else name
        places.append(Place(full, own, KINDS, id))
    bare = sum(not any(place.names) for place in places)
    notes = [f"{bare} instances have no physicalHostTopology"] if bare else []
    return from_places(places, notes=notes)


def _instances(doc: Document) -> list[tuple[Path, dict[str, Any]]]:
    found: list[tuple[Path, dict[str, Any]]] = []
    for d, value in enumerate(doc.data):
        path: Path = (d,)
        if isinstance(value, dict) and "items" in value:
            path, value = (d, "items"), value["items"]
        if isinstance(value, dict):
            found.append((path, value))
            continue
        items = doc.sequence(value, path, "a list of instances")
        found += [
            ((*path, i), doc.mapping(v, (*path, i), "an instance")) for i, v in enumerate(items)
        ]
    return found


def _chain(doc: Document, instance: dict[str, Any], here: Path) -> tuple[str | None, ...]:
    """Host, subblock, block, cluster."""
    here = (*here, "resourceStatus")
    status = doc.mapping(instance.get("resourceStatus") or {}, here, "resourceStatus")
    path = (*here, "physicalHostTopology")
    topology = doc.mapping(status.get("physicalHostTopology") or {}, path, "physicalHostTopology")
    chain = tuple(doc.optional_name(topology, kind, path) for kind in KINDS)
    if any(chain):
        return chain
    text = doc.optional_name(status, "physicalHost", here) or ""
    parts = [part for part in text.split("/") if part]
    return tuple(reversed(parts))
