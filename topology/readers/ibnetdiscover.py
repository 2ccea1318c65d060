"""ibnetdiscover's topology file: every node of an InfiniBand subnet with its cables.

Switch  65 "S-2c5eab0300b87b40"  # "MF0;leaf-04:MQM9701/U1" enhanced port 0 lid 73 lmc 0
[1]     "H-e09d7303007a4bd8"[1](e09d7303007a4bd8)  # "gpu-01 mlx5_5" lid 647 4xNDR
Ca      1 "H-e09d7303007a4bd8"  # "gpu-01 mlx5_5"
[1](e09d7303007a4bd8)  "S-2c5eab0300b87b40"[1]  # lid 7 lmc 0 "MF0;leaf-04:M/U1" lid 73 4xNDR
"""

from __future__ import annotations

import re

from commkit.topology.fabric import Fabric
from commkit.topology.readers.infiniband import LANE, Cables, End
from commkit.topology.readers.source import Source

_NODE = re.compile(r'(Switch|Ca|Rt)\s+(\d+)\s+"([^"]+)"\s*(?:#\s*"([^"]*)")?')
_PORT = re.compile(r'\[(\d+)\](?:\[ext [^\]]*\])?(?:\([0-9a-fA-F]*\))?\s+"([^"]+)"\[(\d+)\]')
_PEER = re.compile(r'"([^"]*)"')
_SPEED = re.compile(r"\b(\d+)x([A-Z]+\d*)\b")
#: Facts of the stanza to come: vendid=, devid=, sysimgguid=, switchguid=, caguid=.
_FACT = re.compile(r"[a-z]+=")


def read(source: Source) -> Fabric:
    """Raises TopologyError for a line of no known kind, NoTopology for a file without nodes."""
    cables = Cables()
    node: tuple[str, bool, str] | None = None
    for number, line in enumerate(source.lines(), 1):
        text = line.strip()
        if not text or text.startswith("#") or _FACT.match(text):
            continue
        if match := _NODE.match(text):
            id, description = match[3], match[4] or ""
            if match[1] == "Rt":
                node = None
                continue
            node = id, match[1] == "Switch", description
            cables.node(id, description, node[1])
            continue
        match = _PORT.match(text)
        if match is None:
            raise source.error_at(
                number,
                1 + len(line) - len(line.lstrip()),
                f"{text!r:.60}: expected a line of "
                'ibnetdiscover: Switch, Ca, or [port] "peer"[port]',
            )
        if node is None:
            continue  # ports of a router
        peer = match[2]
        rest = text[match.end() :]
        named = _PEER.search(rest)
        speed = _SPEED.search(rest)
        gbps = int(speed[1]) * LANE[speed[2]] if speed and speed[2] in LANE else None
        cables.cable(
            End(node[0], int(match[1]), node[2], node[1]),
            End(peer, int(match[3]), named[1] if named else "", peer.startswith("S-")),
            gbps,
        )
    if not cables.switches and not cables.adapters:
        raise source.nothing("no Switch and no Ca")
    return cables.fabric()
