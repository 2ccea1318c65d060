"""LLDP neighbours as `lldpcli -f json show neighbors` prints them: one host's view of its leaves.

A file holds the output of one host, called after the file ("gpu-01.json"), or of many:
{"gpu-01": {"lldp": ...}, "gpu-02": {"lldp": ...}}.  `-f json0` is understood, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from commkit.topology.build import Builder, number_rails
from commkit.topology.fabric import Fabric, Nic
from commkit.topology.readers.document import Document, Path, parse_json
from commkit.topology.readers.source import Source


def read(source: Source) -> Fabric:
    doc = parse_json(source)
    build = Builder()
    for path, host, view in _views(doc, source):
        build.host(host)
        for interface, neighbour, where in _interfaces(doc, view, path):
            found = _chassis(doc, neighbour, where)
            if found is not None:
                name, id = found
                build.attach(host, Nic(interface, build.switch(name, id=id)))
    fabric = build.graph()
    if not fabric.switches:
        raise source.nothing("no neighbour on any interface")
    return number_rails(fabric)


def _views(doc: Document, source: Source) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    for d, value in enumerate(doc.data):
        top = doc.mapping(value, (d,), "lldpcli's output")
        hosts = {source.stem: top} if "lldp" in top else top
        for host, view in hosts.items():
            path: Path = (d,) if "lldp" in top else (d, host)
            inner = doc.mapping(view, path, "lldpcli's output").get("lldp")
            path = (*path, "lldp")
            if isinstance(inner, list):  # json0
                inner, path = (inner[0] if inner else {}), (*path, 0)
            yield path, host, doc.mapping(inner, path, "lldp")


def _interfaces(
    doc: Document, view: dict[str, Any], path: Path
) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """One interface is a mapping, several are a list of mappings; json0 names each inside."""
    path = (*path, "interface")
    held = view.get("interface") or []
    if isinstance(held, dict):
        rows = [(path, held)]
    else:
        items = doc.sequence(held, path, "interface")
        rows = [((*path, i), item) for i, item in enumerate(items)]
    for here, row in rows:
        entry = doc.mapping(row, here, "an interface")
        if isinstance(entry.get("name"), str):
            yield entry["name"], entry, here
            continue
        for name, neighbour in entry.items():
            yield name, doc.mapping(neighbour, (*here, name), "a neighbour"), (*here, name)


def _chassis(doc: Document, neighbour: dict[str, Any], path: Path) -> tuple[str, str | None] | None:
    """(name, id) of the neighbour.  A chassis without a name stands there by its id alone."""
    path = (*path, "chassis")
    chassis = _first(neighbour.get("chassis"))
    if not chassis:
        return None
    chassis = doc.mapping(chassis, path, "chassis")
    name = _first(chassis.get("name"))
    name = name.get("value") if isinstance(name, dict) else None
    if "id" not in chassis:
        name, inner = next(iter(chassis.items()))
        chassis = doc.mapping(inner, (*path, name), "a chassis")
    id = doc.mapping(_first(chassis.get("id")) or {}, (*path, "id"), "id").get("value")
    if name is None and id is None:
        raise doc.error(path, "a chassis without a name and without an id")
    return str(name or id), None if id is None else str(id)


def _first(value: Any) -> Any:
    """json0 puts everything into lists."""
    return (value[0] if value else None) if isinstance(value, list) else value
