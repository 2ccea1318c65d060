"""EC2's DescribeInstanceTopology, as `aws ec2 describe-instance-topology` prints it.

NetworkNodes go from the top down and are three or four: the last one is the switch that the
instance is plugged into.  Pages may follow one another in one file.
"""

from __future__ import annotations

import re

from commkit.topology.build import Place, from_places
from commkit.topology.fabric import Fabric
from commkit.topology.readers.document import parse_json
from commkit.topology.readers.source import Source

#: A capacity block is one NVLink (or NeuronLink) domain for these; for others a reservation only.
_ULTRA_SERVER = re.compile(r"(u-)?p6e-gb|trn2u")


def read(source: Source) -> Fabric:
    doc = parse_json(source)
    places: list[Place] = []
    seen: set[str] = set()
    bare = 0
    for d, value in enumerate(doc.data):
        items = value.get("Instances") if isinstance(value, dict) else value
        path = (d, "Instances") if isinstance(value, dict) else (d,)
        for i, item in enumerate(doc.sequence(items, path, "Instances")):
            here = (*path, i)
            instance = doc.mapping(item, here, "an instance")
            name = doc.name(instance.get("InstanceId"), (*here, "InstanceId"), "InstanceId")
            if name in seen:
                continue  # pages may overlap
            seen.add(name)
            where = (*here, "NetworkNodes")
            nodes = doc.sequence(instance.get("NetworkNodes") or [], where, "NetworkNodes")
            names = [doc.name(node, (*where, n), "a network node") for n, node in enumerate(nodes)]
            bare += not names
            kind = str(instance.get("InstanceType") or "")
            block = doc.optional_name(instance, "CapacityBlockId", here)
            domain = block if _ULTRA_SERVER.match(kind) else None
            places.append(Place(name, tuple(reversed(names)), domain=domain))
    if not places:
        raise source.nothing("no instances")
    notes = [f"{bare} instances have no NetworkNodes: their type has none"] if bare else []
    return from_places(places, notes=notes)
