"""Fabric <-> plain data: what the TOML and JSON of commkit's own format hold.

    format = "commkit-topology/1"; joined, block_sizes, notes
    [[switches]]  name, layer, kind, id, link_speed
    [[links]]     lower, upper, count, gbps: cables from every lower to every upper switch
    [[hosts]]     names, id, domain, devices, nics, paths

`names`, `lower` and `upper` are a host list in one string ("gpu-[001-064]"), or a list of plain
names.  Hosts of one entry are alike.  A key that is absent means: unknown.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any, TypeVar

from commkit.errors import TopologyError, UsageError
from commkit.topology.fabric import Device, Fabric, Host, Link, Nic, Switch
from commkit.topology.hostlist import compress, expand

FORMAT = "commkit-topology/1"
#: One entry says a product of links: no more than a memory holds.
MAX_LINKS = 1 << 20
#: Says where in the file something is wrong: (path, message) -> the error to raise.
Fail = Callable[[tuple[str | int, ...], str], TopologyError]
_Record = TypeVar("_Record", Device, Nic, Switch)

_TOP = ("format", "joined", "block_sizes", "notes", "switches", "links", "hosts")
_LINK = ("lower", "upper", "count", "gbps")
_HOST = ("names", "id", "domain", "devices", "nics", "paths")
#: field -> types, of the records whose fields are all plain.
_TYPES: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "kind": (str,),
    "id": (str,),
    "domain": (str,),
    "busid": (str,),
    "cpus": (str,),
    "model": (str,),
    "switch": (str,),
    "layer": (int,),
    "link_speed": (int,),
    "port": (int,),
    "rail": (int,),
    "numa": (int,),
    "count": (int,),
    "gbps": (int, float),
}
_WORDS: dict[tuple[type, ...], str] = {
    (str,): "text",
    (int,): "a whole number",
    (int, float): "a number",
}


def to_plain(fabric: Fabric) -> dict[str, Any]:
    """Nothing but dicts, lists, text and numbers; from_plain() gives the same Fabric again."""
    plain: dict[str, Any] = {"format": FORMAT}
    if fabric.joined:
        plain["joined"] = True
    if fabric.block_sizes:
        plain["block_sizes"] = list(fabric.block_sizes)
    if fabric.notes:
        plain["notes"] = list(fabric.notes)
    plain["switches"] = [_known(switch) for switch in fabric.switches]
    plain["links"] = list(_links(fabric))
    names = [switch.name for switch in fabric.switches]
    plain["hosts"] = [
        {"names": _list([host.name for host in alike]), **shape}
        for shape, alike in _alike(fabric.hosts, names)
    ]
    return plain


def from_plain(plain: Any, fail: Fail) -> Fabric:
    """Raises what `fail` makes of (path, message) for anything that is not such a description."""
    top = _mapping(plain, (), fail, _TOP)
    if top.get("format") != FORMAT:
        raise fail(("format",), f"format = {top.get('format')!r}: expected {FORMAT!r}")
    switches = [
        _record(Switch, entry, ("switches", i), fail)
        for i, entry in enumerate(_list_of(top, "switches", (), fail))
    ]
    index = {switch.name: i for i, switch in enumerate(switches)}
    links: list[Link] = []
    for i, entry in enumerate(_list_of(top, "links", (), fail)):
        path = ("links", i)
        row = _mapping(entry, path, fail, _LINK)
        ends = [_indices(row, key, index, path, fail) for key in ("lower", "upper")]
        count, gbps = (_value(row, key, path, fail) for key in ("count", "gbps"))
        if len(links) + len(ends[0]) * len(ends[1]) > MAX_LINKS:
            raise fail(
                path, f"more than {MAX_LINKS:,} links: each lower switch has one to each upper"
            )
        links += [Link(a, b, count, _float(gbps)) for a in ends[0] for b in ends[1]]
    hosts: list[Host] = []
    for i, entry in enumerate(_list_of(top, "hosts", (), fail)):
        hosts += _hosts(entry, index, ("hosts", i), fail)
    sizes = _list_of(top, "block_sizes", (), fail)
    for n, size in enumerate(sizes):
        _check(size, (int,), "a block size", ("block_sizes", n), fail)
    notes = _list_of(top, "notes", (), fail)
    for n, note in enumerate(notes):
        _check(note, (str,), "a note", ("notes", n), fail)
    joined = top.get("joined", False)
    if not isinstance(joined, bool):
        raise fail(("joined",), f"joined = {joined!r:.40}: expected true or false")
    try:
        return Fabric(
            tuple(hosts), tuple(switches), tuple(links), tuple(sizes), tuple(notes), joined
        )
    except TopologyError as error:
        raise fail((), str(error)) from None


# --- Out -------------------------------------------------------------------------------------


def _known(record: Any) -> dict[str, Any]:
    """The fields that are known, in order."""
    found = {field.name: getattr(record, field.name) for field in fields(record)}
    return {key: value for key, value in found.items() if value is not None}


def _list(names: Sequence[str]) -> str | list[str]:
    """A host list, where it gives these names again."""
    try:
        text = compress(names)
        return text if expand(text) == list(names) else list(names)
    except UsageError:
        return list(names)


def _links(fabric: Fabric) -> Iterator[dict[str, Any]]:
    """Lower switches that have the same cables to the same upper ones share an entry."""
    names = [switch.name for switch in fabric.switches]
    uppers: dict[tuple[int, int | None, float | None], list[int]] = {}
    for link in fabric.links:
        uppers.setdefault((link.a, link.count, link.gbps), []).append(link.b)
    lowers: dict[tuple[tuple[int, ...], int | None, float | None], list[int]] = {}
    for (lower, count, gbps), above in uppers.items():
        lowers.setdefault((tuple(above), count, gbps), []).append(lower)
    for (upper, count, gbps), below in lowers.items():
        entry: dict[str, Any] = {
            "lower": _list([names[i] for i in below]),
            "upper": _list([names[i] for i in upper]),
        }
        if count is not None:
            entry["count"] = count
        if gbps is not None:
            entry["gbps"] = gbps
        yield entry


def _alike(
    hosts: Sequence[Host], names: Sequence[str]
) -> Iterator[tuple[dict[str, Any], list[Host]]]:
    for shape, group in groupby(hosts, key=lambda host: dataclasses.replace(host, name="")):
        alike = list(group)
        entry: dict[str, Any] = {}
        if shape.id is not None:
            entry["id"] = shape.id
        if shape.domain is not None:
            entry["domain"] = shape.domain
        if shape.nics:
            entry["nics"] = [_nic(nic, names) for nic in shape.nics]
        if shape.devices is not None:
            entry["devices"] = [_known(device) for device in shape.devices]
        if shape.paths:
            entry["paths"] = [list(path) for path in shape.paths]
        yield entry, alike


def _nic(nic: Nic, names: Sequence[str]) -> dict[str, Any]:
    entry = _known(nic)
    if nic.switch is not None:
        entry["switch"] = names[nic.switch]
    return entry


# --- In --------------------------------------------------------------------------------------


def _hosts(
    entry: Any, index: dict[str, int], path: tuple[str | int, ...], fail: Fail
) -> Iterator[Host]:
    row = _mapping(entry, path, fail, _HOST)
    nics: list[Nic] = []
    for i, item in enumerate(_list_of(row, "nics", path, fail)):
        where = (*path, "nics", i)
        values = dict(_mapping(item, where, fail, [field.name for field in fields(Nic)]))
        if "switch" in values:
            name = _value(values, "switch", where, fail)
            if name not in index:
                raise fail((*where, "switch"), f"switch {name!r}: expected the name of a switch")
            values["switch"] = index[name]
        nics.append(_record(Nic, values, where, fail, skip="switch"))
    devices: tuple[Device, ...] | None = None
    if "devices" in row:
        devices = tuple(
            _record(Device, item, (*path, "devices", i), fail)
            for i, item in enumerate(_list_of(row, "devices", path, fail))
        )
    paths: list[tuple[str, str, str]] = []
    for i, item in enumerate(_list_of(row, "paths", path, fail)):
        where = (*path, "paths", i)
        if not (
            isinstance(item, list) and len(item) == 3 and all(isinstance(x, str) for x in item)
        ):
            raise fail(
                where, f"{item!r}: expected [from, to, how], as in ['GPU0', 'mlx5_0', 'PIX']"
            )
        paths.append((item[0], item[1], item[2]))
    id, domain = (_value(row, key, path, fail) for key in ("id", "domain"))
    names = _names(row, "names", path, fail)
    if id is not None and len(names) > 1:
        raise fail((*path, "id"), f"id {id!r} for {len(names)} hosts: expected one host with an id")
    for name in names:
        yield Host(name, tuple(nics), devices, domain, id, tuple(paths))


def _record(
    kind: type[_Record], entry: Any, path: tuple[str | int, ...], fail: Fail, skip: str = ""
) -> _Record:
    row = _mapping(entry, path, fail, [field.name for field in fields(kind)])
    values = {key: row[key] if key == skip else _value(row, key, path, fail) for key in row}
    if "gbps" in values:
        values["gbps"] = _float(values["gbps"])
    if kind is not Nic and "name" not in values:
        raise fail(path, f"no name: expected a name for each {kind.__name__.lower()}")
    return kind(**values)


def _float(value: float | None) -> float | None:
    try:
        return None if value is None else float(value)
    except OverflowError:
        return math.inf  # which the Fabric refuses


def _mapping(
    value: Any, path: tuple[str | int, ...], fail: Fail, keys: Sequence[str]
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fail(path, f"{value!r:.40}: expected a table of {', '.join(keys)}")
    for key in value:
        if key not in keys:
            raise fail((*path, key), f"unknown key {key}: expected {', '.join(keys)}")
    return value


def _list_of(row: dict[str, Any], key: str, path: tuple[str | int, ...], fail: Fail) -> list[Any]:
    value = row.get(key, [])
    if not isinstance(value, list):
        raise fail((*path, key), f"{key} = {value!r:.40}: expected a list")
    return value


def _value(row: dict[str, Any], key: str, path: tuple[str | int, ...], fail: Fail) -> Any:
    if key in row:
        _check(row[key], _TYPES[key], key, (*path, key), fail)
    return row.get(key)


def _check(
    value: Any, types: tuple[type, ...], what: str, path: tuple[str | int, ...], fail: Fail
) -> None:
    if not isinstance(value, types) or isinstance(value, bool):
        raise fail(path, f"{what} = {value!r:.40}: expected {_WORDS[types]}")


def _names(row: dict[str, Any], key: str, path: tuple[str | int, ...], fail: Fail) -> list[str]:
    value = row.get(key)
    if isinstance(value, str):
        try:
            return expand(value)
        except UsageError as error:
            raise fail((*path, key), str(error)) from None
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return list(value)
    raise fail((*path, key), f"{key} = {value!r:.40}: expected a host list or a list of names")


def _indices(
    row: dict[str, Any], key: str, index: dict[str, int], path: tuple[str | int, ...], fail: Fail
) -> list[int]:
    names = _names(row, key, path, fail)
    for name in names:
        if name not in index:
            raise fail((*path, key), f"switch {name!r}: expected the name of a switch")
    return [index[name] for name in names]
