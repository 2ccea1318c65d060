"""The running host: what sysfs says about PCI, NUMA, GPUs and NICs, and NVML where it is there."""

from __future__ import annotations

import importlib
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from commkit.topology.build import natural
from commkit.topology.fabric import Device, Fabric, Host, Nic
from commkit.topology.inside import pci_ways

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")
_NVIDIA, _AMD = "0x10de", "0x1002"
#: Classes of accelerators: VGA, 3D, other display controllers, processing accelerators.
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")


def read(root: str = "/", name: str | None = None, nvml: bool = True) -> Fabric:
    """One host.  `root` is another file system to look into; NVML is asked about this one only.

    Ports that are down are left out, with a note.  Without a readable sysfs the devices are
    unknown (None), not absent.
    """
    sys = Path(root, "sys")
    notes: list[str] = []
    pci = _pci(sys)
    gpus = _gpus(pci, Path(root))
    nics = list(_nics(sys, notes))
    parents: dict[str, str | None] = {}
    for path in pci.values():
        chain = [part for part in path.parts if part.startswith("pci") or _ADDRESS.fullmatch(part)]
        for above, below in itertools.pairwise(chain):
            parents[below] = above
        if chain:
            parents[chain[0]] = None
    numa = {
        top: _text(path.joinpath("numa_node"))
        for path in pci.values()
        for top in [next((part for part in path.parts if part.startswith("pci")), "")]
    }
    known = {top: node for top, node in numa.items() if node not in (None, "-1")}
    names = {gpu.busid: gpu.name for gpu in gpus if gpu.busid is not None}
    for nic in nics:
        if nic.busid in parents and nic.name is not None and nic.name not in names.values():
            key = f"{nic.busid}#{nic.name}"
            parents[key] = parents[nic.busid]
            names[key] = nic.name
    kinds = {(names[a], names[b]): k for (a, b), k in pci_ways(parents, known, list(names)).items()}
    if nvml and root == "/":
        gpus = _ask_nvml(gpus, kinds, notes)
    order = {
        name: i for i, name in enumerate([g.name for g in gpus] + [n.name or "" for n in nics])
    }
    paths = sorted(
        ((a, b, k) if order[a] < order[b] else (b, a, k) for (a, b), k in kinds.items()),
        key=lambda path: (order[path[0]], order[path[1]]),
    )
    devices = tuple(gpus) if sys.joinpath("bus/pci/devices").is_dir() else None
    host = Host(name or os.uname().nodename, tuple(nics), devices, paths=tuple(paths))
    return Fabric((host,), notes=tuple(notes))


def addresses(root: str = "/") -> list[str]:
    """PCI addresses of this host, "0000:1b:00.0"."""
    return list(_pci(Path(root, "sys")))


def _pci(sys: Path) -> dict[str, Path]:
    """Address -> where the device really is, which names the bridges above it."""
    found = sys.joinpath("bus/pci/devices")
    if not found.is_dir():
        return {}
    return {entry.name: entry.resolve() for entry in sorted(found.iterdir())}


def _gpus(pci: dict[str, Path], root: Path) -> list[Device]:
    found: list[Device] = []
    for address, path in pci.items():
        kind, vendor = _text(path / "class") or "", _text(path / "vendor")
        if not kind.startswith(_GPU_CLASSES) or vendor not in (_NVIDIA, _AMD):
            continue
        name = f"GPU{len(found)}"
        found.append(
            Device(name, address, _numa(path), _text(path / "local_cpulist"), _model(root, address))
        )
    return found


def _model(root: Path, address: str) -> str | None:
    text = _text(root / "proc/driver/nvidia/gpus" / address / "information") or ""
    match = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else None


def _nics(sys: Path, notes: list[str]) -> Iterator[Nic]:
    """RDMA devices, then the network interfaces that are not of one of them."""
    taken: set[str] = set()
    for device in _entries(sys / "class/infiniband"):
        address = _address(device)
        if address is not None:
            taken.add(address)
        ports = _entries(device / "ports")
        for port in ports:
            state = _text(port / "state") or ""
            if state and "ACTIVE" not in state:
                notes.append(f"{device.name} port {port.name} is {state} and was left out")
                continue
            rate = _RATE.match(_text(port / "rate") or "")
            number = int(port.name) if len(ports) > 1 and port.name.isdecimal() else None
            gbps = float(rate[1]) if rate else None
            yield Nic(
                device.name,
                port=number,
                gbps=gbps or None,
                busid=address,
                numa=_numa(device / "device"),
            )
    for interface in _entries(sys / "class/net"):
        address = _address(interface)
        if address is None or address in taken:
            continue  # lo, bridges, veth; or the netdev of an RDMA device
        if _text(interface / "operstate") == "down":
            notes.append(f"{interface.name} is down and was left out")
            continue
        speed = _text(interface / "speed")  # Mbit/s; -1 or an error where there is none
        gbps = int(speed) / 1000 if speed and re.fullmatch(r"[1-9]\d*", speed) else None
        yield Nic(interface.name, gbps=gbps, busid=address, numa=_numa(interface / "device"))


def _ask_nvml(
    gpus: list[Device], kinds: dict[tuple[str, str], str], notes: list[str]
) -> list[Device]:
    """Models, and NVLinks between GPUs, from NVML; `gpus` as they are where it is missing."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return gpus
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if gpus:
            notes.append(f"NVML: {error}: NVLinks are unknown")
        return gpus
    try:
        return _with_nvml(nvml, gpus, kinds)
    except nvml.NVMLError as error:
        notes.append(f"NVML: {error}: NVLinks are unknown")
        return gpus
    finally:
        nvml.nvmlShutdown()


def _with_nvml(nvml: Any, gpus: list[Device], kinds: dict[tuple[str, str], str]) -> list[Device]:
    by_address = {gpu.busid: gpu for gpu in gpus}
    links: dict[str, dict[str, int]] = {}
    models: dict[str, str] = {}
    ids: dict[str, str] = {}
    for i in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(i)
        gpu = by_address.get(_short(nvml.nvmlDeviceGetPciInfo(handle).busId))
        if gpu is None:
            continue
        model = nvml.nvmlDeviceGetName(handle)
        models[gpu.name] = _plain(model)
        ids[gpu.name] = _plain(nvml.nvmlDeviceGetUUID(handle))
        ends = links.setdefault(gpu.name, {})
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                    continue
                end = _short(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
            except nvml.NVMLError:
                continue  # a link that this model does not have
            peer = by_address.get(end)
            key = peer.name if peer else ""  # a switch
            ends[key] = ends.get(key, 0) + 1
    for a, b in [(x.name, y.name) for x in gpus for y in gpus if x.name != y.name]:
        direct = links.get(a, {}).get(b, 0)
        count = direct or min(links.get(a, {}).get("", 0), links.get(b, {}).get("", 0))
        if count and (a, b) in kinds:
            kinds[a, b] = f"NV{count}"
    return [replace(g, model=models.get(g.name) or g.model, id=ids.get(g.name)) for g in gpus]


def _plain(text: str | bytes) -> str:
    """Old versions of pynvml return bytes."""
    return text.decode() if isinstance(text, bytes) else str(text)


def _short(bus: str | bytes) -> str:
    """NVML's 00000000:1B:00.0 -> 0000:1b:00.0."""
    text = _plain(bus).lower()
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _address(entry: Path) -> str | None:
    """The PCI device behind a class device; virtio's is one level up."""
    device = entry / "device"
    if not device.exists():
        return None
    for part in reversed(device.resolve().parts):
        if _ADDRESS.fullmatch(part):
            return part
    return None


def _numa(path: Path) -> int | None:
    text = _text(path / "numa_node")
    return int(text) if text is not None and text.isdecimal() else None


def _entries(path: Path) -> list[Path]:
    return sorted(path.iterdir(), key=lambda p: natural(p.name)) if path.is_dir() else []


def _text(path: Path) -> str | None:
    """A file of sysfs; None where there is none or reading it is an error, as for speed."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
