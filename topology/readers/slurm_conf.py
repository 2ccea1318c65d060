"""Slurm's topology.conf, both kinds: SwitchName lines (tree) and BlockName lines (block).

The file says its kind by its keys.  Switches may be defined in any order, form several trees, and
stand alone; a node may be on several leaves.  What topograph writes is of this format; its pseudo
switch `no-topology` holds the nodes of which nothing is known.
Manual: topology.conf(5); behaviour: src/plugins/topology/{tree,block} of Slurm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from commkit.errors import UsageError
from commkit.topology.fabric import Fabric
from commkit.topology.readers.slurm_lexer import Pair, lines, pairs, unexpected
from commkit.topology.readers.slurm_model import (
    BlockLine,
    SwitchLine,
    block,
    check_name,
    check_sizes,
    host_list,
    tree,
)
from commkit.topology.readers.source import Source, content

#: What a line may begin with -> what may follow.
_KEYS = {
    "switchname": ("Nodes", "Switches", "LinkSpeed"),
    "blockname": ("Nodes",),
    "blocksizes": (),
}


def read(source: Source) -> Fabric:
    """Raises TopologyError for a wrong line, NoTopology for a file without any node."""
    records = list(_records(source, frozenset()))
    kinds = {pairs[0].key for _, pairs in records}
    if not kinds:
        raise source.nothing("no switches and no blocks are configured")
    if "switchname" in kinds and kinds & {"blockname", "blocksizes"}:
        where, wrong = next((s, p[0]) for s, p in records if p[0].key != records[0][1][0].key)
        raise where.error(
            wrong.at,
            f"{wrong.written}: expected a tree (SwitchName) or blocks (BlockName), not both",
        )
    if "switchname" in kinds:
        return tree(source, [_switch(*record) for record in records])
    blocks = [_block(*record) for record in records if record[1][0].key == "blockname"]
    sizes: Sequence[int] = ()
    for where, found in records:
        if found[0].key == "blocksizes":
            sizes = _sizes(where, found)
    if not blocks:
        raise source.nothing("BlockSizes without any BlockName")
    return block(source, blocks, sizes)


def _records(source: Source, including: frozenset[str]) -> Iterator[tuple[Source, list[Pair]]]:
    for line in lines(source.text):
        text = line.text
        if text[:7].lower() == "include" and text[7:8].isspace():
            yield from _include(source, text[7:].strip(), line.offset(0), including)
            continue
        found = pairs(line, source)
        if not found:
            raise unexpected(source, line.offset(0), text.strip())
        head = found[0]
        if head.key not in _KEYS:
            raise source.error(
                head.at,
                f"unknown key {head.written}: expected a line to begin with SwitchName, BlockName "
                "or BlockSizes",
            )
        allowed = _KEYS[head.key]
        for pair in found[1:]:
            if pair.key not in map(str.lower, allowed):
                names = ", ".join(allowed) or "nothing more"
                raise source.error(pair.at, f"unknown key {pair.written}: expected {names}")
        yield source, found


def _include(
    source: Source, name: str, at: int, including: frozenset[str]
) -> Iterator[tuple[Source, list[Pair]]]:
    path = Path(source.name).parent / name
    if str(path) in including or len(including) > 20:
        raise source.error(at, f"Include {name}: the file includes itself")
    try:
        text = content(path)
    except UsageError as error:
        raise source.error(at, f"Include {name}: {error}") from None
    yield from _records(Source(str(path), text), including | {str(path)})


def _switch(source: Source, found: list[Pair]) -> SwitchLine:
    head = found[0]
    last = {pair.key: pair for pair in found[1:]}  # of a key that is there twice, the last counts
    name = check_name(source, head.value, head.value_at)
    nodes, switches, speed = (last.get(key) for key in ("nodes", "switches", "linkspeed"))
    if nodes and switches:
        raise source.error(switches.at, f"switch {name} has both nodes and switches: expected one")
    if speed and not speed.value.isdecimal():
        raise source.error(speed.value_at, f"LinkSpeed={speed.value}: expected a whole number")
    return SwitchLine(
        name,
        head.value_at,
        host_list(source, nodes.value, nodes.value_at) if nodes else (),
        host_list(source, switches.value, switches.value_at) if switches else (),
        switches.value_at if switches else head.value_at,
        int(speed.value) if speed else None,
    )


def _block(source: Source, found: list[Pair]) -> BlockLine:
    head = found[0]
    nodes = {pair.key: pair for pair in found[1:]}.get("nodes")
    name = check_name(source, head.value, head.value_at)
    return BlockLine(
        name, head.value_at, host_list(source, nodes.value, nodes.value_at) if nodes else ()
    )


def _sizes(source: Source, found: list[Pair]) -> list[int]:
    pair = found[0]
    parts = [part.strip() for part in pair.value.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise source.error(pair.value_at, f"BlockSizes={pair.value}: expected numbers, as in 8,16")
    sizes = [int(part) for part in parts]
    if wrong := check_sizes(sizes):
        raise source.error(pair.value_at, f"BlockSizes={pair.value}: {wrong}")
    return sizes
