"""What can go wrong in a lab: slow ports, lost packets, small MTUs, hosts that stop.

Ports are devices of nodes: eth<rail> of hosts, down<slot> and up<spine> of leaves,
down<group>r<rail> of spines.  Lab.set_link unplugs a leaf from a spine.
"""

from __future__ import annotations

import re
import signal

from commkit.errors import UsageError
from commkit.topology import netns
from commkit.topology.lab import Lab, LabHost

#: nft's table of faults in each namespace.
TABLE = "commkit_lab"
NEIGHBOURS = "nd-neighbor-solicit, nd-neighbor-advert"


def set_rate(lab: Lab, node: str, device: str, mbit: float) -> None:
    """What a port sends at most."""
    line = f"qdisc replace dev {device} root {netns.shaper(mbit)}"
    netns.batch("tc", [line], lab.namespace(node))


def set_mtu(lab: Lab, node: str, device: str, mtu: int) -> None:
    """Of one end of a cable: what is larger than the far end's MTU vanishes in silence."""
    netns.batch("ip", [f"link set {device} mtu {mtu}"], lab.namespace(node))


def drop(lab: Lab, node: str, device: str, share: float = 1.0, match: str = "") -> None:
    """Of what arrives at a port, lose this share of packets at random; only those that nft
    `match`es, such as "udp dport 4791".  A second fault at the same port adds to the first.  The
    search for neighbours' addresses (ARP, neighbour discovery) is spared.

    Raises UsageError for a share outside 0 to 1, LaunchError where nft is missing or refuses.
    """
    if not 0 < share <= 1:
        raise UsageError(f"a loss of {share}: expected above 0, up to 1")
    chance = "" if share == 1 else f"numgen random mod 1000000 < {round(share * 1e6)} "
    lines = [
        f"add table netdev {TABLE}",
        f"add chain netdev {TABLE} {device} "
        f'{{ type filter hook ingress device "{device}" priority 0; policy accept; }}',
        f"add rule netdev {TABLE} {device} meta protocol arp accept",
        f"add rule netdev {TABLE} {device} icmpv6 type {{ {NEIGHBOURS} }} accept",
        f"add rule netdev {TABLE} {device} {match} {chance}counter drop",
    ]
    netns.call(lab.namespace(node), "nft", "-f", "-", stdin="\n".join(lines) + "\n")


def dropped(lab: Lab, node: str) -> int:
    """Packets that `drop` has lost at this node."""
    text = netns.call(lab.namespace(node), "nft", "list", "ruleset")
    return sum(int(number) for number in re.findall(r"counter packets (\d+) .*drop", text))


def heal(lab: Lab, node: str) -> None:
    """`drop` nothing any more at this node."""
    lines = f"add table netdev {TABLE}\ndelete table netdev {TABLE}\n"
    netns.call(lab.namespace(node), "nft", "-f", "-", stdin=lines)


def set_nic(lab: Lab, host: LabHost, *, up: bool, rail: int = 0) -> None:
    """Unplug a host's cable at the leaf: the host sees its carrier go."""
    line = f"link set down{host.slot} {'up' if up else 'down'}"
    leaf = lab.shape.leaf(*lab.checked_leaf(host.group, rail))
    netns.batch("ip", [line], lab.namespace(leaf))
    if up:
        lab.wait_for(lab.cable(host.name, f"eth{rail}"))


def freeze(lab: Lab, host: LabHost) -> list[int]:
    """SIGSTOP every process of a host, whose kernel goes on answering; their pids."""
    return netns.signal_processes([lab.namespace(host)], signal.SIGSTOP)


def thaw(lab: Lab, host: LabHost) -> list[int]:
    """SIGCONT them."""
    return netns.signal_processes([lab.namespace(host)], signal.SIGCONT)


def power_off(lab: Lab, host: LabHost) -> None:
    """Nothing leaves the host any more, no FIN and no RST; then its processes end."""
    for rail in range(lab.shape.rails):
        set_nic(lab, host, up=False, rail=rail)
    netns.end_processes([lab.namespace(host)])
