"""Inside a host: how near its devices are to one another and to its NICs.

Kinds of way, nearest first, as nvidia-smi names them: NV# (# NVLinks), PIX (one PCIe bridge at
most), PXB (several bridges), PHB (a CPU's host bridge), NODE (between host bridges of one NUMA
node), SYS (between NUMA nodes).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping

from commkit.topology.build import natural
from commkit.topology.fabric import Host

#: kind -> rank, 0 nearest; NV# comes before all of them.
RANKS = {"PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5}
_NVLINK = re.compile(r"NV\d+")


def is_kind(text: str) -> bool:
    return text in RANKS or bool(_NVLINK.fullmatch(text))


def rank(kind: str) -> int:
    """0 for NVLink, else 1 (PIX) to 5 (SYS)."""
    return RANKS.get(kind, 0)


def ways(host: Host) -> dict[tuple[str, str], str]:
    """(a, b) -> kind, both ways round."""
    found = {(a, b): kind for a, b, kind in host.paths}
    return {**{(b, a): kind for (a, b), kind in found.items()}, **found}


def nearest_nics(host: Host, active: Collection[str] | None = None) -> dict[str, str]:
    """Device -> the NIC to use with it.

    Only NICs of `active`, where that is known (those with an RDMA link that is up).  Of several
    that are equally near each device gets one that the fewest devices have got so far.  The ways
    alone do not prove that a NIC is meant for the job: storage NICs look alike.
    """
    nics = list(dict.fromkeys(nic.name for nic in host.nics if nic.name is not None))
    if active is not None:
        nics = [name for name in nics if name in active]
    between = ways(host)
    used: Counter[str] = Counter()
    chosen: dict[str, str] = {}
    for device in host.devices or ():
        near = [
            (rank(between[device.name, nic]), nic) for nic in nics if (device.name, nic) in between
        ]
        if not near:
            continue
        best = min(kind for kind, _ in near)
        nic = min((n for kind, n in near if kind == best), key=lambda n: (used[n], natural(n)))
        used[nic] += 1
        chosen[device.name] = nic
    return chosen


def pci_ways(
    parents: Mapping[str, str | None], numa: Mapping[str, str | None], names: Collection[str]
) -> dict[tuple[str, str], str]:
    """Ways between PCI devices from the tree that they hang in.

    parents  node -> the bridge above it; None above a host bridge or CPU (where children meet)
    numa     top node -> its NUMA node, None if unknown
    names    the nodes between which the ways are wanted
    """
    chains: dict[str, list[str]] = {}
    for name in names:
        chain = [name]
        while (above := parents.get(chain[-1])) is not None:
            chain.append(above)
        chains[name] = chain
    found: dict[tuple[str, str], str] = {}
    ordered = list(names)
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 :]:
            found[a, b] = _way(chains[a], chains[b], numa)
    return found


def _way(a: list[str], b: list[str], numa: Mapping[str, str | None]) -> str:
    """Of two chains from a device up to its top."""
    above = {node: steps for steps, node in enumerate(a)}
    for steps, node in enumerate(b):
        if node in above:
            if node == a[-1]:
                return "PHB"
            # Bridges on the way: those below the common one on both sides, and that one.
            return "PIX" if max(above[node], 1) + max(steps, 1) - 1 <= 1 else "PXB"
    here, there = numa.get(a[-1]), numa.get(b[-1])
    return "NODE" if here is not None and here == there else "SYS"
