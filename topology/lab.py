"""Leaf-spine fabrics out of network namespaces: real packets, real ECMP, on one machine, as root.

Every host, leaf and spine is a network namespace; cables are veth pairs; switches are the kernel,
forwarding by multipath routes; tbf shapes the ports.

    with Lab(leaves=4, spines=2, hosts_per_leaf=2, uplink_mbit=100) as lab:
        a, b = lab.hosts[0], lab.hosts[2]
        flow = lab.flow(a, b, 50000, 7000)
        lab.path(flow)                            # the spine that the leaf's hash chooses
        lab.popen(a, ["python", "train.py"])      # a process of that host
        lab.set_link(0, 1, up=False)              # leaf 0 to spine 1; routes follow, as with BGP
        lab.uplink_bytes()

Faults of ports and hosts are in `topology.faults`.

Leaves hash the five-tuple (policy 3), each with a seed of its own, so that `topology.ecmp.Linux` is
what they do.  Policy 1 would not do: over veth it follows a random number of the sender's socket.

Nothing stays: leaving the context ends the processes in the namespaces and removes them; what a
killed process has left goes when the next lab is made, or by `netns.sweep()`.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from commkit.errors import LaunchError, UsageError
from commkit.topology import netns
from commkit.topology.ecmp import TCP, FiveTuple, Linux
from commkit.topology.fabric import Fabric
from commkit.topology.shape import Cable, LabHost, Shape, spine_device

__all__ = ["Lab", "LabHost"]

#: fib_multipath_hash_fields: addresses, protocol, ports; no flow label, no inner header.
FIVE_TUPLE = 0x01 | 0x02 | 0x04 | 0x10 | 0x20
#: All hosts of the fabric, IPv4 and IPv6.
EVERYTHING = ("10.0.0.0/8", "fd00::/16")


_T = TypeVar("_T")


@dataclass(frozen=True)
class Spines:
    """A leaf's hash over those spines that lead to the destination (a model, as in ecmp)."""

    hash: Linux
    alive: tuple[int, ...]

    def path(self, flow: FiveTuple) -> int:
        return self.alive[self.hash.path(flow)]


class Lab:
    """A context manager; `up` and `down` are its two ends.

    leaves, spines    leaf groups and spines; every leaf has a cable to every spine
    hosts_per_leaf    or one number for each leaf group, in place of `leaves`
    rails             NICs of a host, each with a leaf of its own; `rail_only`: and own spines
    host_mbit, uplink_mbit   what each end of a cable sends at most; None: as fast as the CPU
    ipv6              as well as IPv4
    seed              the leaves' hash seeds are seed, seed + 1, ... in the order of shape.leaves

    Raises UsageError for sizes that do not fit, LaunchError (on `up`) where there can be no lab.
    """

    def __init__(
        self,
        leaves: int | None = None,
        spines: int = 2,
        hosts_per_leaf: int | Sequence[int] = 2,
        *,
        rails: int = 1,
        rail_only: bool = False,
        host_mbit: float | None = None,
        uplink_mbit: float | None = None,
        ipv6: bool = True,
        seed: int = 1,
    ) -> None:
        sizes = (
            (hosts_per_leaf,) * (2 if leaves is None else leaves)
            if isinstance(hosts_per_leaf, int)
            else tuple(hosts_per_leaf)
        )
        if leaves is not None and len(sizes) != leaves:
            raise UsageError(f"{len(sizes)} sizes for {leaves} leaves: expected one for each")
        for what, mbit in (("host_mbit", host_mbit), ("uplink_mbit", uplink_mbit)):
            if mbit is not None and not 0.1 <= mbit <= 1e6:
                raise UsageError(f"{what}={mbit}: expected 0.1 to 1000000 Mbit/s, or None")
        self.shape = Shape(sizes, spines, rails, rail_only)
        if not 0 < seed <= (1 << 32) - len(self.shape.leaves):
            raise UsageError(f"seed {seed}: expected 1 or more, and every leaf's below 2**32")
        self.host_mbit, self.uplink_mbit = host_mbit, uplink_mbit
        self.ipv6, self.seed = ipv6, seed
        self.prefix = ""
        self._owner = 0
        self._down: set[tuple[int, int, int]] = set()
        #: leaf -> its present routes upwards: prefixes (IPv4, IPv6) -> spines
        self._routed: dict[tuple[int, int], dict[tuple[str, str], tuple[int, ...]]] = {}
        self._processes: list[subprocess.Popen[Any]] = []

    @property
    def hosts(self) -> tuple[LabHost, ...]:
        return self.shape.hosts

    def namespace(self, node: str | LabHost) -> str:
        """Of a host, or of a node's name: leaf0, spine1, leaf0-rail1."""
        name = node.name if isinstance(node, LabHost) else node
        if not self.prefix:
            raise UsageError(f"{name}: the lab is not up")
        return self.prefix + name

    def fabric(self) -> Fabric:
        """What readers would make of a description of this lab."""
        nic, up = self.host_mbit, self.uplink_mbit
        return self.shape.fabric(nic and nic / 1000, up and up / 1000)

    # --- Life --------------------------------------------------------------------------------

    def up(self) -> Lab:
        if self.prefix:
            raise UsageError("the lab is up already")
        if why := netns.why_not():
            raise LaunchError(f"no lab can be made here: {why}")
        netns.sweep()
        self.prefix, self._owner = netns.new_prefix(), os.getpid()
        self._down, self._routed = set(), {}
        try:
            self._build()
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """End the processes of all hosts and remove everything.  A forked child removes nothing."""
        if not self.prefix or self._owner != os.getpid():
            return
        # Another signal must not cut it short; what it starts does not hear one either.
        late = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, late)
        try:
            netns.remove(netns.names(self.prefix))
            self.prefix = ""
            for process in self._processes:
                process.kill()  # it may have gone into a namespace of its own
                process.wait()
            self._processes.clear()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> Lab:
        return self.up()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    def _build(self) -> None:
        shape = self.shape
        addresses: dict[str, list[str]] = {node: ["link set lo up"] for node in shape.nodes}
        shaping: dict[str, list[str]] = {node: [] for node in shape.nodes}
        links = []
        for cable in shape.cables():
            ends = (
                (cable.lower, cable.lower_device, cable.lower_addresses),
                (cable.upper, cable.upper_device, cable.upper_addresses),
            )
            (low, low_device, _), (high, high_device, _) = ends
            links.append(
                f"link add name {low_device} netns {self.namespace(low)} type veth "
                f"peer name {high_device} netns {self.namespace(high)}"
            )
            mbit = self.uplink_mbit if cable.is_uplink else self.host_mbit
            for node, device, (four, six) in ends:
                addresses[node].append(f"addr add {four} dev {device}")
                if self.ipv6:
                    addresses[node].append(f"addr add {six} dev {device} nodad")
                addresses[node].append(f"link set {device} up")
                if mbit is not None:
                    shaping[node].append(f"qdisc add dev {device} root {netns.shaper(mbit)}")
        netns.batch("ip", [f"netns add {self.namespace(node)}" for node in shape.nodes])
        for node in shape.nodes:  # before there are devices, which take over the defaults
            with netns.thread_inside(self.namespace(node)):
                _set(self._sysctls(node))
        netns.batch("ip", links)
        names = [f"{host.address} {host.name}" for host in self.hosts]
        for host in self.hosts:
            etc = netns.ETC / self.namespace(host)
            etc.mkdir(parents=True)
            (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *names]))
        routes = self._fixed_routes()
        for node in shape.nodes:
            netns.batch("ip", [*addresses[node], *routes.get(node, ())], self.namespace(node))
            netns.batch("tc", shaping[node], self.namespace(node))
        for leaf in shape.leaves:
            self._route_up(leaf)
        if self.ipv6:
            ports: dict[str, list[str]] = {}
            for cable in shape.cables():
                ports.setdefault(cable.lower, []).append(cable.lower_device)
                ports.setdefault(cable.upper, []).append(cable.upper_device)
            for node, devices in ports.items():
                netns.wait_for_ipv6(self.namespace(node), devices)

    def wait_for(self, cable: Cable) -> None:
        """Until both ends of a cable that was plugged in carry packets."""
        if self.ipv6:
            netns.wait_for_ipv6(self.namespace(cable.lower), [cable.lower_device])
            netns.wait_for_ipv6(self.namespace(cable.upper), [cable.upper_device])

    def cable(self, lower: str, device: str) -> Cable:
        """The cable at a host's eth<rail> or a leaf's up<spine>."""
        return self._cables[lower, device]

    @functools.cached_property
    def _cables(self) -> dict[tuple[str, str], Cable]:
        return {(cable.lower, cable.lower_device): cable for cable in self.shape.cables()}

    def _sysctls(self, node: str) -> dict[str, int]:
        found = {"ipv4/conf/all/rp_filter": 0, "ipv4/conf/default/rp_filter": 0}
        if self.ipv6:
            found |= {
                # Addresses are usable at once, and stay while a cable is out.
                "ipv6/conf/all/disable_ipv6": 0,
                "ipv6/conf/all/accept_dad": 0,
                "ipv6/conf/default/accept_dad": 0,
                "ipv6/conf/all/keep_addr_on_down": 1,
                "ipv6/conf/default/keep_addr_on_down": 1,
            }
        if not node.startswith(("leaf", "spine")):
            return found
        # A router that answers every probe: how long hops take to answer is no subject here.
        found |= {"ipv4/ip_forward": 1, "ipv4/icmp_ratelimit": 0, "ipv4/icmp_msgs_per_sec": 1 << 20}
        # It answers from the port at which the packet came in, as switches do.
        found |= {"ipv4/icmp_msgs_burst": 1 << 20, "ipv4/icmp_errors_use_inbound_ifaddr": 1}
        if self.ipv6:
            found |= {"ipv6/conf/all/forwarding": 1, "ipv6/icmp/ratelimit": 0}
        for number, (group, rail) in enumerate(self.shape.leaves):
            if node == self.shape.leaf(group, rail):
                found["ipv4/fib_multipath_hash_seed"] = self.seed + number
                for family in ("ipv4", "ipv6") if self.ipv6 else ("ipv4",):
                    found[f"{family}/fib_multipath_hash_policy"] = 3
                    found[f"{family}/fib_multipath_hash_fields"] = FIVE_TUPLE
        return found

    def _fixed_routes(self) -> dict[str, list[str]]:
        """Of hosts: each rail's addresses by its NIC; of leaves: nothing of their own goes up again
        where a host is unplugged; of spines: each leaf by its cable."""
        shape, found = self.shape, dict[str, list[str]]()
        for host in self.hosts:
            for rail in range(shape.rails):
                to = shape.rail_prefixes(rail)
                for prefix, gateway in self._both(zip(to, shape.gateway(host, rail), strict=True)):
                    where = f"via {gateway} dev eth{rail}"
                    found.setdefault(host.name, []).append(f"route add {prefix} {where}")
                    if rail == 0:
                        found[host.name].append(f"route add default {where}")
        for group, rail in shape.leaves:
            device = spine_device(group, rail)
            found[shape.leaf(group, rail)] = [
                f"route add blackhole {prefix} metric 2000"
                for prefix in self._both(shape.leaf_prefixes(group, rail))
            ]
            for spine in range(shape.spines):
                lines = found.setdefault(shape.spine(spine, rail), [])
                to, by = shape.leaf_prefixes(group, rail), shape.leaf_addresses(group, rail, spine)
                for prefix, gateway in self._both(zip(to, by, strict=True)):
                    lines.append(f"route replace {prefix} via {gateway} dev {device}")
        return found

    def _both(self, pair: Iterable[_T]) -> list[_T]:
        """Of an IPv4 and an IPv6 one, those that this lab has."""
        return list(pair)[: 2 if self.ipv6 else 1]

    # --- Links -------------------------------------------------------------------------------

    def spines_between(self, source: tuple[int, int], target: tuple[int, int]) -> tuple[int, ...]:
        """Spines with a cable to both leaves (group, rail) that is up."""
        return tuple(
            s
            for s in range(self.shape.spines)
            if (*source, s) not in self._down and (*target, s) not in self._down
        )

    def _reachable(self, leaf: tuple[int, int]) -> list[tuple[int, int]]:
        """The leaves to which it has spines in common."""
        return [
            other
            for other in self.shape.leaves
            if other != leaf and (not self.shape.rail_only or other[1] == leaf[1])
        ]

    def _route_up(self, leaf: tuple[int, int]) -> None:
        """A leaf's routes as links are now: one over its spines, and one for each leaf that some
        of these do not reach."""
        name = self.namespace(self.shape.leaf(*leaf))
        own = self.spines_between(leaf, leaf)
        ways = {EVERYTHING: own}
        for other in self._reachable(leaf):
            if (some := self.spines_between(leaf, other)) != own:
                ways[self.shape.leaf_prefixes(*other)] = some
        before = self._routed.get(leaf, {})
        if ways == before:
            return
        # Not `route replace`, which adds where kinds or numbers of next hops differ (IPv6).
        netns.batch(
            "ip", [f"route del {p}" for both in before for p in self._both(both)], name, force=True
        )
        lines = []
        for prefixes, spines in ways.items():
            for index, prefix in enumerate(self._both(prefixes)):
                by = [
                    f"via {self.shape.spine_addresses(*leaf, s)[index]} dev up{s}" for s in spines
                ]
                if len(by) > 1:
                    by = [f"nexthop {hop}" for hop in by]
                kind = "" if by else "unreachable "
                lines.append(" ".join([f"route add {kind}{prefix}", *by]))
        netns.batch("ip", lines, name)
        self._routed[leaf] = ways

    def set_link(
        self, group: int, spine: int, *, up: bool, rail: int = 0, converge: bool = True
    ) -> None:
        """Unplug a leaf's cable to a spine, or plug it in again.

        Both ends see it at once.  `converge`: so do all other leaves' routes, as a routing protocol
        would have it; without that they go on sending what is for this leaf to that spine, which
        has lost the way: a black hole, until `converge()`.
        """
        leaf = self.checked_leaf(group, rail)
        if not 0 <= spine < self.shape.spines:
            raise UsageError(f"spine {spine}: expected 0 to {self.shape.spines - 1}")
        end = (*leaf, spine)
        (self._down.discard if up else self._down.add)(end)
        word = "up" if up else "down"
        name = self.shape.leaf(*leaf)
        netns.batch("ip", [f"link set up{spine} {word}"], self.namespace(name))
        if up:  # the kernel has dropped what led over it
            spine_name = self.shape.spine(spine, rail)
            netns.batch("ip", self._fixed_routes()[spine_name], self.namespace(spine_name))
            self.wait_for(self.cable(name, f"up{spine}"))
        if converge:
            self.converge()
        else:
            self._route_up(leaf)

    def converge(self) -> None:
        """Routes of all leaves as links are now."""
        for leaf in self.shape.leaves:
            self._route_up(leaf)

    def checked_leaf(self, group: int, rail: int) -> tuple[int, int]:
        """(group, rail); UsageError if there is no such leaf."""
        if not (0 <= group < self.shape.groups and 0 <= rail < self.shape.rails):
            raise UsageError(
                f"leaf {group} of rail {rail}: expected 0 to {self.shape.groups - 1}, and a rail "
                f"of 0 to {self.shape.rails - 1}"
            )
        return group, rail

    # --- What hashes choose ------------------------------------------------------------------

    def flow(
        self,
        source: LabHost,
        target: LabHost,
        source_port: int,
        target_port: int,
        *,
        protocol: int = TCP,
        rail: int = 0,
        ipv6: bool = False,
    ) -> FiveTuple:
        a, b = (h.addresses6[rail] if ipv6 else h.addresses4[rail] for h in (source, target))
        return FiveTuple(a, b, protocol, source_port, target_port)

    def model(self, source: LabHost, target: LabHost, rail: int = 0) -> Spines:
        """The hash of the source's leaf: its paths are spines.

        Raises UsageError for hosts under one leaf, or without a spine in common.
        """
        a, b = self.checked_leaf(source.group, rail), self.checked_leaf(target.group, rail)
        if a == b:
            raise UsageError(f"{source.name} and {target.name} are under one leaf: no spine")
        alive = self.spines_between(a, b)
        if not alive:
            raise UsageError(
                f"{source.name} and {target.name}: no spine with cables to both leaves"
            )
        seed = self.seed + self.shape.leaves.index(a)
        return Spines(Linux(seed, (1,) * len(alive)), alive)

    def place_of(self, address: str) -> tuple[LabHost, int]:
        """The host and rail of one of its addresses."""
        found = self._places.get(address)
        if found is None:
            raise UsageError(f"{address}: no address of a host of this lab")
        return found

    @functools.cached_property
    def _places(self) -> dict[str, tuple[LabHost, int]]:
        return {
            address: (host, rail)
            for host in self.hosts
            for some in (host.addresses4, host.addresses6)
            for rail, address in enumerate(some)
        }

    def path(self, flow: FiveTuple) -> int:
        """The spine that carries a flow, by the model."""
        (source, rail), (target, _) = self.place_of(flow.source), self.place_of(flow.destination)
        return self.model(source, target, rail).path(flow)

    def spine_of(self, address: str) -> int | None:
        """The spine that answers by this address; None: it is no spine's."""
        return self._answers.get(address)

    @functools.cached_property
    def _answers(self) -> dict[str, int]:
        return {
            address: spine
            for group, rail in self.shape.leaves
            for spine in range(self.shape.spines)
            for address in self.shape.spine_addresses(group, rail, spine)
        }

    # --- Counters ----------------------------------------------------------------------------

    def uplink_bytes(self) -> dict[tuple[int, int, int], tuple[int, int]]:
        """(group, rail, spine) -> bytes that the leaf has sent up, and received from above.

        As its port counts them, Ethernet headers included; segments that the sender has left to
        the NIC (TSO) count with one header for all.
        """
        found = {}
        for group, rail in self.shape.leaves:
            with netns.thread_inside(self.namespace(self.shape.leaf(group, rail))):
                text = Path("/proc/thread-self/net/dev").read_text()
            for line in text.splitlines()[2:]:
                device, _, numbers = line.strip().partition(":")
                if device.startswith("up"):
                    fields = numbers.split()
                    found[group, rail, int(device[2:])] = int(fields[8]), int(fields[0])
        return found

    # --- Processes ---------------------------------------------------------------------------

    def command(self, host: LabHost, command: Sequence[str | os.PathLike[str]]) -> list[str]:
        """`command` as a process of the host, with its name and its /etc/hosts."""
        rename = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
        inside = ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts"]
        return [*inside, "sh", "-c", rename, host.name, *(os.fspath(word) for word in command)]

    def popen(
        self, host: LabHost, command: Sequence[str | os.PathLike[str]], **options: Any
    ) -> subprocess.Popen[Any]:
        """subprocess.Popen there; `down` kills and reaps it."""
        process = subprocess.Popen(self.command(host, command), **options)
        self._processes.append(process)
        return process

    def pids(self, *hosts: LabHost) -> list[int]:
        """Processes on these hosts (none given: on all)."""
        return netns.pids(self.namespace(host) for host in hosts or self.hosts)


def _set(values: dict[str, int]) -> None:
    """In the namespace that this thread is in; LaunchError for one that is not there."""
    for key, value in values.items():
        try:
            Path("/proc/sys/net", key).write_text(str(value))
        except OSError as error:
            # In older kernels these are the machine's, not the namespace's.
            if "icmp_msgs" in key:
                continue
            hint = "; without IPv6: ipv6=False, --no-ipv6" if "ipv6" in key else ""
            raise LaunchError(
                f"sysctl net/{key}={value}: {error.strerror}: a lab needs it{hint}"
            ) from None
