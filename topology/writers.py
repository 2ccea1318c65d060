"""Fabric -> text: commkit's own TOML and JSON, which keep everything, and Slurm's topology.conf."""

from __future__ import annotations

import re
from collections.abc import Sequence

from commkit.errors import NoTopology, UsageError
from commkit.topology.build import natural
from commkit.topology.fabric import Fabric
from commkit.topology.hostlist import compress
from commkit.topology.readers.own import write_json, write_toml

#: As topograph calls the switch of nodes of which nothing is known.
NO_TOPOLOGY = "no-topology"
MAX_NAME = 64
_UNFIT = re.compile(r"[\s,\[\]#\"\\=]+")


def slurm_conf(fabric: Fabric) -> str:
    """Slurm's topology.conf with the same groups of hosts.

    Slurm wants a tree: switches that together connect the same hosts (spines, the leaves of a
    rail group) become one, called after the first of them.  Blocks stay blocks.  NICs, speeds and
    rails have no place in it.  Raises NoTopology without switches, UsageError for a host name that
    a host list cannot hold.
    """
    if len(fabric.unplaced) == len(fabric.hosts):
        raise NoTopology("no switch has a host: nothing to write into a topology.conf")
    lines = _blocks(fabric) if _is_blocks(fabric) else _tree(fabric)
    lost = [fabric.hosts[i].name for i in fabric.unplaced]
    if lost and not _is_blocks(fabric):
        lines.append(f"SwitchName={NO_TOPOLOGY} Nodes={_list(lost)}")
    return "\n".join(lines) + "\n"


WRITERS = {"toml": write_toml, "slurm": slurm_conf, "json": write_json}


def write(fabric: Fabric, to: str) -> str:
    """`to`: a key of WRITERS."""
    if to not in WRITERS:
        raise UsageError(f"{to!r}: expected one of {', '.join(WRITERS)}")
    return WRITERS[to](fabric)


def _is_blocks(fabric: Fabric) -> bool:
    return all(switch.kind == ("blocks" if switch.layer else "block") for switch in fabric.switches)


def _blocks(fabric: Fabric) -> list[str]:
    lines: list[str] = []
    names = _Names()
    for switch, hosts in zip(fabric.switches, fabric.attached, strict=True):
        if switch.layer == 0:
            nodes = f" Nodes={_list([fabric.hosts[i].name for i in hosts])}" if hosts else ""
            lines.append(f"BlockName={names.fresh(switch.name)}{nodes}")
    if fabric.block_sizes:
        lines.append(f"BlockSizes={','.join(map(str, fabric.block_sizes))}")
    return lines


def _tree(fabric: Fabric) -> list[str]:
    names = _Names()
    levels = fabric.levels()
    nodes: dict[str, list[str]] = {}  # name -> hosts that hang directly there
    children: dict[str, dict[str, None]] = {}
    speeds: dict[str, int | None] = {}
    where: list[str | None] = [None] * len(fabric.hosts)
    for level in levels:
        called: list[str] = []
        for switches in level.switches:
            own = [fabric.switches[s] for s in switches]
            name = names.of(switches, own[0].name, len(own))
            called.append(name)
            children.setdefault(name, {})
            speeds[name] = own[0].link_speed if len(own) == 1 else None
        for host, group in enumerate(level.group):
            if group < 0:
                continue
            name, below = called[group], where[host]
            if below is None:
                nodes.setdefault(name, []).append(fabric.hosts[host].name)
            elif below != name:  # else the branch ended lower: the very same group
                children[name][below] = None
            where[host] = name
    tops = list(dict.fromkeys(name for name in where if name is not None))
    if fabric.joined and len(tops) > 1:
        # Without a common switch Slurm would keep a job from spanning them.
        children[names.fresh("all")] = dict.fromkeys(tops)
    lines: list[str] = []
    for name, inner in children.items():
        hosts = nodes.get(name, [])
        names_below = list(inner)
        if hosts and names_below:
            # Slurm wants either: the hosts of a switch that has switches get one of their own.
            extra = names.fresh(f"{name}-hosts")
            lines.append(f"SwitchName={extra} Nodes={_list(hosts)}")
            names_below.append(extra)
            hosts = []
        what = f"Nodes={_list(hosts)}" if hosts else f"Switches={_list(names_below)}"
        speed = speeds.get(name)
        lines.append(f"SwitchName={name} {what}" + (f" LinkSpeed={speed}" if speed else ""))
    return lines


def _list(names: Sequence[str]) -> str:
    for name in names:
        if _UNFIT.search(name):
            raise UsageError(f'name {name!r}: a topology.conf holds no blank, comma, [ ] # " \\ =')
    return compress(sorted(names, key=natural))


class _Names:
    """One name for each group of switches, fit for a topology.conf."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], str] = {}
        self.taken: set[str] = {NO_TOPOLOGY}

    def of(self, switches: tuple[int, ...], first: str, count: int) -> str:
        if switches not in self.known:
            wish = first if count == 1 else f"{first}+{count - 1}"
            self.known[switches] = self.fresh(wish)
        return self.known[switches]

    def fresh(self, wish: str) -> str:
        base = _UNFIT.sub("_", wish)
        name, number = base[:MAX_NAME], 1
        while name in self.taken:
            number += 1
            tail = f"-{number}"
            name = base[: MAX_NAME - len(tail)] + tail
        self.taken.add(name)
        return name
