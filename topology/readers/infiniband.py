"""What ibnetdiscover and iblinkinfo have in common: node descriptions, speeds, the fabric."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from commkit.topology.build import Builder, natural, number_rails
from commkit.topology.fabric import Fabric, Nic

#: Gbit/s of one lane by the name of its speed; as ibnetdiscover writes it: 4xNDR.
LANE = {
    "SDR": 2.5,
    "DDR": 5.0,
    "QDR": 10.0,
    "FDR10": 10.0,
    "FDR": 14.0,
    "EDR": 25.0,
    "HDR": 50.0,
    "NDR": 100.0,
    "XDR": 200.0,
}
#: Signalling rates that iblinkinfo prints, and the names' rates above.
_SIGNALLED = {14.0625: 14.0, 25.78125: 25.0, 53.125: 50.0, 106.25: 100.0, 212.5: 200.0}
_SWITCH = re.compile(r"[^;:]*;([^;:]+):[^;:]+(?:/[^;:]*)?")
_HOST = re.compile(r"(\S+)\s+(\S+)")
#: Descriptions that adapters have when nobody has named their host.
_UNNAMED = re.compile(
    r"^(localhost\b|MT\d+|ConnectX|Mellanox|Infiniscale|SwitchX|Quantum|ibsim)|Technologies", re.I
)
_AGGREGATION = re.compile(r"aggregation node", re.I)


def lane_gbps(signalled: float) -> float:
    return _SIGNALLED.get(signalled, signalled)


def switch_name(description: str) -> str | None:
    """`MF0;leaf-101:MQM8700/U1` -> leaf-101; None for a description that names nothing."""
    match = _SWITCH.fullmatch(description)
    if match:
        return match[1]
    text = description.strip()
    return None if not text or _UNNAMED.search(text) or " " in text else text


def host_and_adapter(description: str) -> tuple[str, str] | None:
    """`gpu-a1 mlx5_0` -> (gpu-a1, mlx5_0); None for an adapter that does not say its host."""
    match = _HOST.fullmatch(description.strip())
    if match is None or _UNNAMED.search(description):
        return None
    return match[1], match[2]


def is_aggregation(description: str) -> bool:
    """The in-network reduction engine inside a switch: an adapter, and nobody's host."""
    return bool(_AGGREGATION.search(description))


@dataclass(frozen=True, slots=True)
class End:
    """One side of a cable."""

    id: str
    port: int
    description: str
    is_switch: bool


@dataclass
class Cables:
    """Cables by their two ports: both sides list each of them, and it counts once."""

    #: id -> description; switches and adapters in order of appearance
    switches: dict[str, str] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    found: dict[tuple[tuple[str, int], ...], tuple[End, End, float | None]] = field(
        default_factory=dict
    )

    def node(self, id: str, description: str, is_switch: bool) -> None:
        known = self.switches if is_switch else self.adapters
        if not known.get(id):
            known[id] = description

    def cable(self, a: End, b: End, gbps: float | None) -> None:
        for end in (a, b):
            self.node(end.id, end.description, end.is_switch)
        key = tuple(sorted([(a.id, a.port), (b.id, b.port)]))
        seen = self.found.get(key)
        if seen is None or seen[2] is None:
            self.found[key] = a, b, gbps

    def fabric(self) -> Fabric:
        build = Builder()
        names = _switch_names(self.switches)
        index = {id: build.switch(names[id], id=id) for id in self.switches}
        owners = self._owners(build)
        direct = 0
        nics: dict[str, list[Nic]] = {}
        several = _several_ports(self.found)
        for a, b, gbps in self.found.values():
            if a.is_switch and b.is_switch:
                if a.id != b.id:
                    build.link(index[a.id], index[b.id], 1, gbps)
                continue
            adapter, switch = (b, a) if a.is_switch else (a, b)
            if not switch.is_switch:
                direct += 1
                continue
            if adapter.id in owners:
                host, name = owners[adapter.id]
                port = adapter.port if adapter.id in several else None
                nics.setdefault(host, []).append(Nic(name, index[switch.id], port, gbps=gbps))
        for host, held in nics.items():
            for nic in sorted(held, key=lambda n: (natural(n.name or ""), n.port or 0)):
                build.attach(host, nic)
        if not self.switches:
            build.notes.append("no switches in this file: every host is as near as any other")
        elif direct:
            build.notes.append(f"{direct} cables join two hosts directly and were left out")
        return number_rails(build.graph())

    def _owners(self, build: Builder) -> dict[str, tuple[str, str]]:
        """Adapter -> (host, adapter's name there), of those that say it."""
        said = {
            id: host_and_adapter(description)
            for id, description in self.adapters.items()
            if not is_aggregation(description)
        }
        times = Counter(said.values())
        unnamed = sum(owner is None for owner in said.values())
        if unnamed:
            build.notes.append(f"{unnamed} adapters do not say their host and were left out")
        twice = [owner for owner, count in times.items() if owner is not None and count > 1]
        if twice:
            some = ", ".join(" ".join(owner) for owner in twice[:4])
            build.notes.append(
                f"several adapters have the same description and were left out: {some}"
            )
        owners = {
            id: owner for id, owner in said.items() if owner is not None and times[owner] == 1
        }
        for host, _ in owners.values():
            build.host(host)
        return owners


def _switch_names(switches: dict[str, str]) -> dict[str, str]:
    """Names where they tell switches apart, else with the GUID behind, else the GUID."""
    names = {id: switch_name(description) or id for id, description in switches.items()}
    times: dict[str, int] = {}
    for name in names.values():
        times[name] = times.get(name, 0) + 1
    return {
        id: f"{name}-{id}" if times[name] > 1 and name != id else name for id, name in names.items()
    }


def _several_ports(
    found: dict[tuple[tuple[str, int], ...], tuple[End, End, float | None]],
) -> set[str]:
    """Adapters of which more than one port is plugged in."""
    ports: dict[str, set[int]] = {}
    for a, b, _ in found.values():
        for end in (a, b):
            if not end.is_switch:
                ports.setdefault(end.id, set()).add(end.port)
    return {id for id, used in ports.items() if len(used) > 1}
