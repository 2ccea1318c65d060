"""A fabric as a tree for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from rich.tree import Tree

from commkit.errors import UsageError
from commkit.topology.build import natural
from commkit.topology.fabric import Fabric, Host, Level
from commkit.topology.hostlist import compress
from commkit.topology.inside import nearest_nics
from commkit.topology.readers.source import printable

#: Entries below one switch or on one line, before the rest is only counted.
LIMIT = 24


def tree(fabric: Fabric, limit: int = LIMIT) -> Tree:
    """Groups of hosts by the switches that join them, the farthest first, then notes."""
    root = Tree(_text(summary(fabric)))
    levels = fabric.levels()
    if levels:
        last = levels[-1]
        for group in range(last.groups):
            _branch(root, fabric, levels, len(levels) - 1, group, limit)
    lost = [fabric.hosts[i] for i in fabric.unplaced]
    known = [host for host in lost if host.devices or host.nics]
    for host in known[:limit]:
        _inside(root, host, limit)
    if lost and not known:
        root.add(_text(f"no known place: {_names([host.name for host in lost])}"))
    elif len(known) > limit:
        root.add(_text(f"... {len(known) - limit:,} more"))
    for note in fabric.notes:
        root.add(_text(f"note: {note}"))
    return root


def _text(line: str) -> Text:
    return Text(printable(line))


def summary(fabric: Fabric) -> str:
    """`12,544 hosts, 8 rails; switches by layer: 196 leaf, 32 spine; 2 separate fabrics`."""
    parts = [_count(len(fabric.hosts), "host")]
    domains = len(set(fabric.domains()) - {-1})
    if domains:
        parts[0] += f", {_count(domains, 'NVLink domain')}"
    if fabric.rails:
        parts[0] += f", {_count(len(fabric.rails), 'rail')}"
    layers = []
    for layer in range(fabric.depth):
        kinds = {s.kind for s in fabric.switches if s.layer == layer}
        count = sum(1 for s in fabric.switches if s.layer == layer)
        word = kinds.pop() if len(kinds) == 1 else None
        layers.append(f"{count:,} {word}" if word else f"{count:,}")
    parts.append(f"switches by layer: {', '.join(layers)}" if layers else "no switches")
    apart = len(set(fabric.components()) - {-1})
    if apart > 1:
        parts.append(f"{apart} separate fabrics")
    if fabric.block_sizes:
        parts.append(f"block sizes {', '.join(map(str, fabric.block_sizes))}")
    return "; ".join(parts)


def _branch(
    above: Tree, fabric: Fabric, levels: Sequence[Level], at: int, group: int, limit: int
) -> None:
    level = levels[at]
    hosts = [i for i, own in enumerate(level.group) if own == group]
    below = levels[at - 1] if at else None
    # A branch that ends lower is the same group, with the same switches, down there.
    if below is not None:
        under = {below.group[i] for i in hosts}
        if len(under) == 1 and -1 not in under:
            (only,) = under
            if below.switches[only] == level.switches[group]:
                _branch(above, fabric, levels, at - 1, only, limit)
                return
    place = above.add(_text(_label(fabric, level, group, len(hosts))))
    if below is None:
        _hosts(place, fabric, hosts)
        return
    direct = [i for i in hosts if below.group[i] < 0]
    inner = sorted({below.group[i] for i in hosts if below.group[i] >= 0})
    for child in inner[:limit]:
        _branch(place, fabric, levels, at - 1, child, limit)
    if len(inner) > limit:
        place.add(_text(f"... {len(inner) - limit:,} more"))
    if direct:
        _hosts(place, fabric, direct)


def _label(fabric: Fabric, level: Level, group: int, hosts: int) -> str:
    label = f"{_names([fabric.switches[s].name for s in level.switches[group]])}  "
    label += _count(hosts, "host")
    cables, gbps = level.uplinks[group], level.uplink_gbps[group]
    if cables:
        label += f", {_count(cables, 'uplink')}"
        if gbps:
            label += f", {gbps:,.0f} Gbit/s up"
    return label


def _hosts(place: Tree, fabric: Fabric, hosts: Sequence[int]) -> None:
    by_domain: dict[str | None, list[str]] = {}
    for i in hosts:
        by_domain.setdefault(fabric.hosts[i].domain, []).append(fabric.hosts[i].name)
    for domain, names in by_domain.items():
        place.add(_text(_names(names) + ("" if domain is None else f"  ({domain})")))


def _inside(place: Tree, host: Host, limit: int) -> None:
    """Devices with the NIC to use, for hosts that are known from within."""
    chosen = nearest_nics(host)
    kinds = {(a, b): kind for a, b, kind in host.paths}
    inner = place.add(_text(host.name))
    for device in (host.devices or ())[:limit]:
        parts = [device.name, device.model, device.busid]
        if device.numa is not None:
            parts.append(f"NUMA {device.numa}")
        if nearest := chosen.get(device.name):
            parts.append(f"→ {nearest} ({kinds.get((device.name, nearest), '?')})")
        inner.add(_text("  ".join(part for part in parts if part)))
    for nic in host.nics[:limit]:
        parts = [nic.name or "?", nic.busid]
        if nic.gbps is not None:
            parts.append(f"{nic.gbps:g} Gbit/s")
        if nic.numa is not None:
            parts.append(f"NUMA {nic.numa}")
        inner.add(_text("  ".join(part for part in parts if part)))


def _names(names: Sequence[str]) -> str:
    names = sorted(names, key=natural)
    try:
        text = compress(names)
    except UsageError:
        text = ", ".join(names)
    return text if len(text) <= 200 else f"{text[:190]}... ({len(names):,})"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"
