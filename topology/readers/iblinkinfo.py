"""iblinkinfo, by node or one link a line (-l).

    CA: gpu-01 mlx5_0:
      0xe41d2d0300309251  8  1[  ] ==( 4X 106.25 Gbps Active/  LinkUp)==>  22  1[  ] "MF0;a:X/U1"
    Switch: 0x506b4b0300820910 MF0;a:X/U1:
      2  1[  ] ==( 4X 106.25 Gbps Active/  LinkUp)==>  3  1[  ] "gpu-01 mlx5_0"

Without -l a peer has no GUID, only LID and description: the LID is what joins the two sides then,
and only a subnet with a manager has LIDs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from commkit.topology.fabric import Fabric
from commkit.topology.readers.infiniband import Cables, End, lane_gbps
from commkit.topology.readers.source import Source

_HEADER = re.compile(r"(CA|Switch|Router):\s*(?:(0x[0-9a-fA-F]+)\s+)?(.*):\s*$")
_LINK = re.compile(
    r'\s*(?:(0x[0-9a-fA-F]+)\s+)?(?:"([^"]*)"\s+)?(\d+)\s+(\d+)\[[^\]]*\]\s*==\((.*?)\)==>\s*(.*)$'
)
_PEER = re.compile(r'(?:(0x[0-9a-fA-F]+)\s+)?(\d+)\s+(\d+)\[[^\]]*\]\s+"([^"]*)"')
_RATE = re.compile(r"(\d+)X\s+(\d+(?:\.\d+)?) Gbps")


@dataclass(frozen=True, slots=True)
class _Side:
    key: str  #: GUID with -l, else LID
    port: int
    description: str


def read(source: Source) -> Fabric:
    """Ports that are down are left out.  Raises TopologyError, NoTopology."""
    ports: dict[str, set[int]] = {}
    switches: dict[str, bool] = {}  # where a heading says it
    guids: dict[str, str] = {}
    rows: list[tuple[_Side, _Side, float | None]] = []
    header: re.Match[str] | None = None
    for number, line in enumerate(source.lines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if found := _HEADER.match(text):
            header = found
            continue
        match = _LINK.match(line)
        if match is None or (match[2] is None and header is None):
            raise source.error_at(
                number,
                1 + len(line) - len(line.lstrip()),
                f"{text!r:.60}: expected a line of iblinkinfo: CA:, Switch:, or a link ==( )==>",
            )
        guid, described, lid, port = match[1], match[2], match[3], int(match[4])
        if described is None and header is not None:
            described = header[3]
            switches[lid] = header[1] == "Switch"
            guids[lid] = header[2] or guid or f"lid-{lid}"
            own = _Side(lid, port, described.strip())
        else:
            own = _Side(guid or lid, port, (described or "").strip())
        ports.setdefault(own.key, set()).add(port)
        peer = _PEER.match(match[6])
        if peer is None or "LinkUp" not in match[5]:
            continue
        if "0" in (own.key, peer[1] or peer[2]):
            raise source.error_at(
                number, 1, "LID 0: no subnet manager gave LIDs; take the output of iblinkinfo -l"
            )
        other = _Side(peer[1] or peer[2], int(peer[3]), peer[4])
        ports.setdefault(other.key, set()).add(other.port)
        rate = _RATE.search(match[5])
        gbps = int(rate[1]) * lane_gbps(float(rate[2])) if rate else None
        rows.append((own, other, gbps))
    if not rows:
        raise source.nothing("no link that is up")

    def end(side: _Side) -> End:
        switch = switches.get(side.key)
        if switch is None:
            # -l does not say it.  A switch has one GUID for many ports, an adapter one for each.
            text = side.description
            switch = len(ports[side.key]) > 1 or ";" in text or " " not in text
        return End(guids.get(side.key, side.key), side.port, side.description, switch)

    cables = Cables()
    for own, other, gbps in rows:
        cables.cable(end(own), end(other), gbps)
    return cables.fabric()
