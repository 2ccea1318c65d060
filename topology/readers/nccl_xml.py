"""NCCL's topology XML, dumped (NCCL_TOPO_DUMP_FILE) or written by hand: the inside of one host.

    <system version="1">
      <cpu numaid="0" arch="x86_64" ...>
        <pci busid="0000:07:00.0" class="0x060400" ...>
          <pci busid="0000:0a:00.0" class="0x030200"><gpu dev="0" .../></pci>
          <pci busid="0000:08:00.0" class="0x020700"><nic><net name="mlx5_0" .../></nic></pci>

Hand-written files invent bridges (bus ids ffff:...), and have no <gpu> and <nic>: then the class
of the PCI device says what it is.  What NCCL itself would stumble over is noted.
Behaviour: src/graph/{topo,xml}.cc of NCCL.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from commkit.topology.build import natural
from commkit.topology.fabric import Device, Fabric, Host, Nic
from commkit.topology.inside import pci_ways
from commkit.topology.readers.source import Source
from commkit.topology.readers.xml import Element, parse

#: Elements that NCCL 2.30 can hold when it fuses the trees of a host's ranks.
MAX_NODES = 256
_BUSID = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.I)
_NEEDED = ("arch",)
_NEEDED_X86 = ("vendor", "familyid", "modelid")


@dataclass
class _Found:
    parents: dict[str, str | None] = field(default_factory=dict)
    numa: dict[str, str | None] = field(default_factory=dict)
    #: element -> its name in the Fabric
    gpus: dict[str, Device] = field(default_factory=dict)
    nics: list[tuple[str, Nic]] = field(default_factory=list)
    #: bus id -> [(target bus id, target class, count)]
    nvlinks: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)
    elements: int = 0
    places: dict[str, Element] = field(default_factory=dict)


def read(source: Source) -> Fabric:
    """One host, called after the file.  Raises TopologyError, NoTopology."""
    root = parse(source)
    if root.tag != "system":
        raise source.error_at(root.line, root.column, f"<{root.tag}>: expected <system>")
    by_host: dict[str | None, _Found] = {}
    notes: list[str] = []
    for number, cpu in enumerate(root.all("cpu")):
        found = by_host.setdefault(cpu.get("host_hash"), _Found())
        top = f"cpu {number}"
        found.parents[top] = None
        found.numa[top] = cpu.get("numaid")
        notes += _lint_cpu(cpu)
        for child in cpu.children:
            _device(source, child, top, cpu, found)
    for found in by_host.values():
        if found.elements > MAX_NODES:
            notes.append(
                f"{found.elements} elements of one host: NCCL 2.30 holds {MAX_NODES} and stops "
                "with 'too many XML nodes' where the host's ranks exchange their trees"
            )
    if not by_host:
        raise source.nothing("no <cpu> in this file")
    if len(by_host) == 1:
        ((hash, found),) = by_host.items()
        return Fabric((_host(found, source.stem, hash, None),), notes=tuple(notes))
    # Several hosts in one file share an NVLink domain: NCCL writes them together for that.
    hosts = [
        _host(found, f"{source.stem}-{n}", hash, source.stem)
        for n, (hash, found) in enumerate(by_host.items())
    ]
    return Fabric(tuple(hosts), notes=tuple(notes))


def missing_devices(fabric: Fabric, visible: Collection[str]) -> str | None:
    """What is wrong if this machine's PCI devices are `visible`, None if nothing.

    A file taken on another machine has other bus ids; NCCL then silently ignores its branches.
    """
    here = {bus_id(text) for text in visible}
    listed = {
        "GPU": [d.busid for host in fabric.hosts for d in host.devices or ()],
        "NIC": [n.busid for host in fabric.hosts for n in host.nics],
    }
    known = {what: [id for id in ids if id is not None] for what, ids in listed.items()}
    if not any(known.values()):
        return "no bus ids in this file: nothing to compare with this host"
    for what, ids in known.items():
        lost = [id for id in ids if bus_id(id) not in here]
        if lost:
            kept = len(ids) - len(lost)
            return (
                f"{f'{kept} of {len(ids)}' if kept else 'no'} {what} of this file exists here "
                f"({', '.join(lost[:4])} not found): the file is of another machine; keep <cpu> "
                "and <pci>, drop <gpu> and <nic>, renumber"
            )
    return None


def bus_id(text: str) -> str:
    """Domain in four digits, lower case: nvidia-smi writes 00000000:1B:00.0."""
    match = _BUSID.fullmatch(text.strip())
    if match is None:
        return text.strip().lower()
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()


def _device(source: Source, element: Element, parent: str, cpu: Element, found: _Found) -> None:
    """A child of <cpu> or <pci>: a bridge, a GPU, a NIC."""
    if parent.startswith("cpu "):
        found.elements += sum(1 for _ in element.walk())
    numa = _number(cpu.get("numaid"))
    if element.tag == "nic":  # directly at the CPU: a virtual NIC
        _nics(source, element, parent, None, numa, found)
        return
    if element.tag != "pci":
        return
    raw = element.get("busid")
    if raw is None:
        raise source.error_at(element.line, element.column, "<pci> without busid: expected one")
    id = bus_id(raw)
    while id in found.parents and id.startswith("ffff:"):
        id += "'"  # invented, and nobody's but this file's
    if id in found.parents:
        first = found.places[id].line
        raise source.error_at(
            element.line, element.column, f"busid {raw} occurs twice, first on line {first}"
        )
    found.parents[id] = parent
    found.places[id] = element
    kind = (element.get("class") or "").lower().removeprefix("0x")
    gpus, nics = list(element.all("gpu")), list(element.all("nic"))
    for gpu in gpus:
        dev = gpu.get("dev")
        _gpu(found, id, int(dev) if dev and dev.isdecimal() else None, numa, cpu)
        for link in gpu.all("nvlink"):
            target = bus_id(link.get("target") or "")
            count = _number(link.get("count")) or 1
            found.nvlinks.setdefault(id, []).append((target, link.get("tclass") or "", count))
    for nic in nics:
        _nics(source, nic, id, id, numa, found)
    if not gpus and kind.startswith(("0302", "0300", "0380")):
        _gpu(found, id, None, numa, cpu)
    elif not nics and kind.startswith(("0200", "0207")):
        found.nics.append((id, Nic(id, busid=id, numa=numa)))
    for child in element.all("pci"):
        _device(source, child, id, cpu, found)


def _gpu(found: _Found, id: str, dev: int | None, numa: int | None, cpu: Element) -> None:
    taken = {device.name for device in found.gpus.values()}
    number = len(taken) if dev is None else dev
    while f"GPU{number}" in taken:
        number += 1
    found.gpus[id] = Device(f"GPU{number}", id, numa, _mask(cpu.get("affinity")))


def _nics(
    source: Source, nic: Element, at: str, busid: str | None, numa: int | None, found: _Found
) -> None:
    for net in nic.all("net"):
        name = net.get("name") or busid or f"net{len(found.nics)}"
        speed = _number(net.get("speed"))  # Mbit/s
        gbps = speed / 1000 if speed else None
        port = _number(net.get("port"))
        several = sum(1 for other in nic.all("net") if other.get("name") == net.get("name")) > 1
        found.nics.append((at, Nic(name, None, port if several else None, None, gbps, busid, numa)))


def _host(found: _Found, name: str, hash: str | None, domain: str | None) -> Host:
    parents = dict(found.parents)
    names = {id: device.name for id, device in found.gpus.items()}
    for place, nic in found.nics:
        if nic.name is not None and nic.name not in names.values():
            # A NIC hangs where its PCI device hangs, and one without at its CPU.
            key = f"{place}#{nic.name}"
            parents[key] = parents[place] or place
            names[key] = nic.name
    between = pci_ways(parents, found.numa, list(names))
    kinds = {(names[a], names[b]): kind for (a, b), kind in between.items()}
    kinds.update(_nvlink_ways(found))
    devices = tuple(sorted(found.gpus.values(), key=lambda d: natural(d.name)))
    nics = list(dict.fromkeys(nic.name for _, nic in found.nics if nic.name is not None))
    order = {name: i for i, name in enumerate([device.name for device in devices] + nics)}
    paths = sorted(
        ((a, b, kind) if order[a] < order[b] else (b, a, kind) for (a, b), kind in kinds.items()),
        key=lambda path: (order[path[0]], order[path[1]]),
    )
    held = tuple(nic for _, nic in found.nics)
    return Host(name, held, devices, domain, hash, tuple(paths))


def _nvlink_ways(found: _Found) -> dict[tuple[str, str], str]:
    """Direct links, and through NVSwitches: as many as the poorer of two GPUs has."""
    switched = {
        id: sum(count for _, kind, count in links if kind.lower().startswith("0x0680"))
        for id, links in found.nvlinks.items()
    }
    order = list(found.gpus)
    kinds: dict[tuple[str, str], str] = {}
    for i, a in enumerate(order):
        for b in order[i + 1 :]:
            direct = max(
                sum(count for target, _, count in found.nvlinks.get(one, []) if target == other)
                for one, other in ((a, b), (b, a))
            )
            count = direct + min(switched.get(a, 0), switched.get(b, 0))
            if count:
                kinds[found.gpus[a].name, found.gpus[b].name] = f"NV{count}"
    return kinds


def _lint_cpu(cpu: Element) -> list[str]:
    needed = _NEEDED + (_NEEDED_X86 if cpu.get("arch") == "x86_64" else ())
    missing = [name for name in needed if cpu.get(name) is None]
    if not missing:
        return []
    return [
        f"line {cpu.line}: <cpu numaid={cpu.get('numaid') or '?'}> has no {', '.join(missing)}: "
        "NCCL stops there; it needs arch, and for x86_64 vendor, familyid and modelid"
    ]


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def _mask(text: str | None) -> str | None:
    """NCCL's CPU mask, words of 32 bits, highest first -> a list as the kernel writes it."""
    if text is None or not re.fullmatch(r"[0-9a-fA-F]{1,8}(,[0-9a-fA-F]{8})*", text):
        return None
    bits = int(text.replace(",", ""), 16)
    runs: list[str] = []
    at = 0
    while bits >> at:
        if bits >> at & 1:
            end = at
            while bits >> (end + 1) & 1:
                end += 1
            runs.append(str(at) if at == end else f"{at}-{end}")
            at = end
        at += 1
    return ",".join(runs) or None
