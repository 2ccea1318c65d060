"""Which format a text is, by what only that format has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from commkit.topology.readers.source import Source

#: The first one that is found anywhere counts.
_PATTERNS = {
    "toml": r"(?m)^\s*format\s*=\s*[\"']commkit-topology/",
    "ibnetdiscover": r'(?m)^(Switch|Ca|Rt)\s+\d+\s+"|^(switchguid|caguid)=',
    "iblinkinfo": r"==\([^\n]*\)==>",
    "nvidia-smi": r"(?m)^(\s|\x1b\[[0-9;]*m)*GPU\d+\b.*$\n^\s*GPU0\s+X\s",
    "slurm-conf": r"(?mi)^\s*(SwitchName|BlockName|BlockSizes)\s*=",
    "slurm-yaml": r"(?m)^-\s+(\{\s*)?[\"']?topology[\"']?\s*:",
    "k8s": r"(?m)^kind:\s*[\"']?(HyperNode|Node|Topology|List|\w+List)\b",
    "gcp": r"(?m)^\s*physicalHost(Topology)?:",
}


def detect(source: Source) -> str | None:
    """A key of FORMATS, None for none of them."""
    text = source.text.lstrip("\ufeff \t\r\n")
    if text[:1] == "<":
        return "nccl-xml"
    if text[:1] in ("{", "["):
        found = _json(text)
        if found is not None:
            return found
    for name, pattern in _PATTERNS.items():
        if re.search(pattern, source.text):
            return name
    return _by_name(source, text)


def _json(text: str) -> str | None:
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    if isinstance(value, list):
        value = next((item for item in value if isinstance(item, dict)), None)
        if value is None:
            return None
        return next((name for name, test in _LISTED.items() if test(value)), None)
    return next((name for name, test in _OBJECTS.items() if test(value)), None)


def _is_instance(value: dict[str, Any]) -> bool:
    return "resourceStatus" in value or str(value.get("kind", "")).startswith("compute#")


_LISTED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "netq": lambda v: "links" in v and "nodes" in v,
    "ec2": lambda v: "InstanceId" in v,
    "gcp": _is_instance,
}
_OBJECTS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "json": lambda v: str(v.get("format", "")).startswith("commkit-topology/"),
    "topograph": lambda v: "instances" in v,
    "ec2": lambda v: "Instances" in v,
    "gcp": _is_instance,
    "k8s": lambda v: "kind" in v and ("items" in v or "metadata" in v),
    "lldp": lambda v: "lldp" in v or _all_lldp(v),
}


def _all_lldp(value: dict[str, Any]) -> bool:
    return bool(value) and all(isinstance(v, dict) and "lldp" in v for v in value.values())


def _by_name(source: Source, text: str) -> str | None:
    """By the name, for texts that do not get as far as to say what they are."""
    if source.name.endswith(".toml"):
        return "toml"
    if source.name.endswith(".conf"):
        return "slurm-conf"
    # Files in which nothing is yet: comments only, or nothing at all.
    bare = all(not line or line.startswith("#") for line in map(str.strip, text.splitlines()))
    if not bare:
        return None
    return "slurm-yaml" if source.name.endswith((".yaml", ".yml")) else "slurm-conf"
