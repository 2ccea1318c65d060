"""The plan of a lab: names, addresses and cables of a leaf-spine fabric, before any is made.

Hosts sit under groups of leaves, one leaf for each rail.  Every leaf has a cable to every spine;
with `rail_only` each rail has spines of its own.

    IPv4  10.0.0.0/8 for hosts: a rail is one prefix, a leaf of it one prefix, a host a /30
          172.16.0.0/12 for uplinks: a /30 each
    IPv6  fd00:RAIL:GROUP:SLOT::/64 for hosts, fd01:LEAF:SPINE::/64 for uplinks
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, replace

from commkit.errors import UsageError
from commkit.topology.fabric import Fabric, leaf_spine

_HOSTS4, _UPLINKS4 = int(ipaddress.ip_address("10.0.0.0")), int(ipaddress.ip_address("172.16.0.0"))


def _bits(count: int) -> int:
    """Bits that number `count` things."""
    return max(0, (count - 1).bit_length())


@dataclass(frozen=True)
class LabHost:
    """addresses4[rail], addresses6[rail]; NICs are eth0, eth1, ... by rail."""

    index: int
    name: str
    group: int
    slot: int
    addresses4: tuple[str, ...]
    addresses6: tuple[str, ...]

    @property
    def address(self) -> str:
        """By which its name is known."""
        return self.addresses4[0]


@dataclass(frozen=True)
class Cable:
    """Two nodes, the device at each, and their addresses with prefix lengths; `lower` is nearer to
    the hosts."""

    lower: str
    lower_device: str
    lower_addresses: tuple[str, str]
    upper: str
    upper_device: str
    upper_addresses: tuple[str, str]
    is_uplink: bool


@dataclass(frozen=True)
class Shape:
    """sizes  hosts under each leaf group.  UsageError for what does not fit the address plan."""

    sizes: tuple[int, ...]
    spines: int
    rails: int = 1
    rail_only: bool = False

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1 or self.spines < 1 or self.rails < 1:
            raise UsageError(
                f"a lab of {self.sizes} hosts under its leaves, {self.spines} spines, "
                f"{self.rails} rails: expected 1 or more of each"
            )
        need = _bits(self.rails) + self._group_bits + self._slot_bits
        links = ((self.rails - 1 << self._group_bits) + len(self.sizes)) * self.spines
        leaves = (self.rails - 1 << self._group_bits) + len(self.sizes)
        # Each is 16 bits of an IPv6 address.
        most = max(leaves, self.spines, self.rails, *self.sizes)
        if need > 24 or links > 1 << 18 or most > 1 << 16:
            raise UsageError(
                f"a lab of {len(self.sizes)} leaves, {self.spines} spines, {self.rails} rails and "
                f"up to {max(self.sizes)} hosts a leaf does not fit into 10.0.0.0/8 and "
                "172.16.0.0/12, or 16 bits of an IPv6 address: expected fewer"
            )

    @property
    def groups(self) -> int:
        return len(self.sizes)

    @property
    def planes(self) -> int:
        return self.rails if self.rail_only else 1

    @property
    def _group_bits(self) -> int:
        return _bits(len(self.sizes))

    @property
    def _slot_bits(self) -> int:
        return 2 + _bits(max(self.sizes))

    # --- Names -------------------------------------------------------------------------------

    def leaf(self, group: int, rail: int = 0) -> str:
        return f"leaf{group}-rail{rail}" if self.rails > 1 else f"leaf{group}"

    def spine(self, spine: int, rail: int = 0) -> str:
        return f"spine{spine}-rail{rail}" if self.planes > 1 else f"spine{spine}"

    @property
    def leaves(self) -> list[tuple[int, int]]:
        """(group, rail) of every leaf."""
        return [(group, rail) for rail in range(self.rails) for group in range(self.groups)]

    @functools.cached_property
    def hosts(self) -> tuple[LabHost, ...]:
        places = [(g, slot) for g, size in enumerate(self.sizes) for slot in range(size)]
        rails = range(self.rails)
        return tuple(
            LabHost(
                index,
                f"h{index}",
                group,
                slot,
                tuple(self._host4(group, rail, slot, 2) for rail in rails),
                tuple(self._host6(group, rail, slot, 2) for rail in rails),
            )
            for index, (group, slot) in enumerate(places)
        )

    @property
    def nodes(self) -> list[str]:
        """Every name, switches first."""
        return [
            *(self.leaf(group, rail) for group, rail in self.leaves),
            *(self.spine(s, plane) for plane in range(self.planes) for s in range(self.spines)),
            *(host.name for host in self.hosts),
        ]

    # --- Addresses ---------------------------------------------------------------------------

    def _host4(self, group: int, rail: int, slot: int, end: int) -> str:
        number = (rail << self._group_bits | group) << self._slot_bits
        return str(ipaddress.IPv4Address(_HOSTS4 + number + 4 * slot + end))

    def _host6(self, group: int, rail: int, slot: int, end: int) -> str:
        return str(ipaddress.IPv6Address(f"fd00:{rail:x}:{group:x}:{slot:x}::{end}"))

    def _uplink(self, group: int, rail: int, spine: int, end: int) -> tuple[str, str]:
        leaf = rail << self._group_bits | group
        four = ipaddress.IPv4Address(_UPLINKS4 + 4 * (leaf * self.spines + spine) + end)
        return str(four), str(ipaddress.IPv6Address(f"fd01:{leaf:x}:{spine:x}::{end}"))

    def leaf_prefixes(self, group: int, rail: int) -> tuple[str, str]:
        """IPv4 and IPv6 of the hosts under a leaf."""
        first = self._host4(group, rail, 0, 0)
        return f"{first}/{32 - self._slot_bits}", f"fd00:{rail:x}:{group:x}::/48"

    def rail_prefixes(self, rail: int) -> tuple[str, str]:
        """Of all hosts' NICs of a rail."""
        length = 32 - self._slot_bits - self._group_bits
        return f"{self._host4(0, rail, 0, 0)}/{length}", f"fd00:{rail:x}::/32"

    def gateway(self, host: LabHost, rail: int) -> tuple[str, str]:
        """The leaf's addresses on a host's cable."""
        return (
            self._host4(host.group, rail, host.slot, 1),
            self._host6(host.group, rail, host.slot, 1),
        )

    def spine_addresses(self, group: int, rail: int, spine: int) -> tuple[str, str]:
        """A spine's addresses on its cable to a leaf: by them it answers hosts of that leaf."""
        return self._uplink(group, rail, spine, 2)

    def leaf_addresses(self, group: int, rail: int, spine: int) -> tuple[str, str]:
        """A leaf's addresses on its uplink."""
        return self._uplink(group, rail, spine, 1)

    def cables(self) -> Iterator[Cable]:
        for host in self.hosts:
            for rail in range(self.rails):
                four, six = self.gateway(host, rail)
                yield Cable(
                    host.name,
                    f"eth{rail}",
                    (f"{host.addresses4[rail]}/30", f"{host.addresses6[rail]}/64"),
                    self.leaf(host.group, rail),
                    f"down{host.slot}",
                    (f"{four}/30", f"{six}/64"),
                    False,
                )
        for group, rail in self.leaves:
            for spine in range(self.spines):
                low4, low6 = self.leaf_addresses(group, rail, spine)
                high4, high6 = self.spine_addresses(group, rail, spine)
                yield Cable(
                    self.leaf(group, rail),
                    f"up{spine}",
                    (f"{low4}/30", f"{low6}/64"),
                    self.spine(spine, rail),
                    spine_device(group, rail),
                    (f"{high4}/30", f"{high6}/64"),
                    True,
                )

    # --- As everything else knows fabrics ----------------------------------------------------

    def fabric(self, nic_gbps: float | None = None, uplink_gbps: float | None = None) -> Fabric:
        made = leaf_spine(
            self.sizes,
            spines=self.spines,
            rails=self.rails,
            rail_only=self.rail_only,
            nic_gbps=nic_gbps,
            uplink_gbps=uplink_gbps,
            host_name="h{0}",
        )
        hosts = tuple(
            replace(h, nics=tuple(replace(nic, name=f"eth{nic.rail}") for nic in h.nics))
            for h in made.hosts
        )
        return replace(made, hosts=hosts)


def spine_device(group: int, rail: int) -> str:
    """The port of a spine that leads to a leaf."""
    return f"down{group}r{rail}"
