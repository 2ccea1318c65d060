"""What the hosts of a running job know of themselves, gathered over the agent tree into a Fabric.

One rank of each host reads what its system shows (topology/readers/node.py); rank 0 gets all of it.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from dataclasses import dataclass, replace

from commkit.errors import TopologyError
from commkit.overlay import World
from commkit.topology.build import with_insides
from commkit.topology.fabric import Fabric, Host
from commkit.topology.plain import from_plain, to_plain
from commkit.topology.readers import node
from commkit.topology.workers import rail_mismatches, rails_of

#: Of one kind; thousands of hosts may have the same to say.
MOST_NOTES = 16


@dataclass(frozen=True)
class Running:
    """A job's hosts in the order of their lowest ranks, and who is on them."""

    fabric: Fabric
    ranks: tuple[tuple[int, ...], ...]  #: host -> its ranks by local rank
    #: rank -> the name of its accelerator in its host, "GPU3"; None where that is not known
    devices: tuple[str | None, ...]


def gather(
    world: World, network: Fabric | None = None, *, busid: str = "", timeout: float = 300.0
) -> Running | None:
    """At rank 0 what all hosts are, None elsewhere; every rank calls it.

    network  what rank 0 knows of the fabric: the hosts' insides are added to it, by name or id
    busid    PCI address of this rank's accelerator, where it has bound one
    timeout  seconds

    Raises OverlayTimeout naming who did not come, RankDied.
    """
    me = world.identity
    here = None
    if me.local_rank == 0:
        name = world.spec.host.names[0]
        here = to_plain(node.read(name=name))
    part = json.dumps([me.host_index, me.local_rank, busid, here])
    parts = world.gather(zlib.compress(part.encode()), tag="topology", timeout=timeout)
    if parts is None:
        return None
    told = [json.loads(zlib.decompress(part)) for part in parts]
    ranks: dict[int, dict[int, int]] = {}  # host -> local rank -> rank
    for rank, (number, local, _, _) in enumerate(told):
        ranks.setdefault(number, {})[local] = rank
    insides = [from_plain(told[on[0]][3], _never) for on in ranks.values()]
    notes = [note for inside in insides for note in inside.notes]
    hosts = _named_once([inside.hosts[0] for inside in insides], notes)
    fabric = Fabric() if network is None else network
    fabric = with_insides(fabric, hosts).select(host.name for host in hosts)
    rails = {host.name: found for host in fabric.hosts if (found := rails_of(host))}
    notes += map(str, rail_mismatches(rails)[:MOST_NOTES])
    kept = fabric.notes if network is not None else ()  # without one no host has a place
    fabric = replace(fabric, notes=(*kept, *dict.fromkeys(notes)))
    devices: list[str | None] = [None] * len(told)
    for host, on in zip(fabric.hosts, ranks.values(), strict=True):
        names = {device.busid: device.name for device in host.devices or () if device.busid}
        for rank in on.values():
            devices[rank] = names.get(told[rank][2].lower())
    by_local = tuple(tuple(on[local] for local in sorted(on)) for on in ranks.values())
    return Running(fabric, by_local, tuple(devices))


def _never(path: tuple[str | int, ...], message: str) -> TopologyError:
    return TopologyError(f"a host's own description: {path}: {message}")


def _named_once(hosts: list[Host], notes: list[str]) -> list[Host]:
    """Containers may all be called alike: then a number tells them apart."""
    times = Counter(host.name for host in hosts)
    seen: Counter[str] = Counter()
    made = []
    for host in hosts:
        if times[host.name] > 1:
            seen[host.name] += 1
            host = replace(host, name=f"{host.name}#{seen[host.name]}")
        made.append(host)
    for name, count in times.items():
        if count > 1:
            notes.append(f"{count} hosts are called {name}: COMMKIT_HOST_NAME tells them apart")
    return made
