"""topograph's graph output: instances with their switches, closest first.

{"instances": [{"id": "I21", "network_layers": ["leaf-a", "spine-a"], "labels": {...}}]}
Its Slurm output is topology.conf or .yaml, its Kubernetes output labels of nodes.
"""

from __future__ import annotations

from commkit.topology.build import Place, from_places
from commkit.topology.fabric import Fabric
from commkit.topology.readers.document import parse_json
from commkit.topology.readers.source import Source

DOMAIN_LABELS = ("accelerator.topograph.run/domain", "network.topology.nvidia.com/accelerator")


def read(source: Source) -> Fabric:
    doc = parse_json(source)
    places: list[Place] = []
    for d, value in enumerate(doc.data):
        top = doc.mapping(value, (d,), "topograph's output")
        path = (d, "instances")
        for i, item in enumerate(doc.sequence(top.get("instances"), path, "instances")):
            here = (*path, i)
            instance = doc.mapping(item, here, "an instance")
            name = doc.name(instance.get("id"), (*here, "id"), "the instance's id")
            layers = instance.get("network_layers") or []
            where = (*here, "network_layers")
            names = [
                doc.name(layer, (*where, n), "a switch") if layer else None
                for n, layer in enumerate(doc.sequence(layers, where, "network_layers"))
            ]
            labels = doc.mapping(instance.get("labels") or {}, (*here, "labels"), "labels")
            domain = next((str(labels[key]) for key in DOMAIN_LABELS if labels.get(key)), None)
            places.append(Place(name, tuple(names), domain=domain))
    if not places:
        raise source.nothing("no instances")
    return from_places(places)
