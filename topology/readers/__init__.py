"""One module a format: text -> Fabric.

`read` takes a file and finds its format by what is in it; FORMATS names them all.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from commkit.errors import TopologyError, UsageError
from commkit.topology.fabric import Fabric
from commkit.topology.readers.detect import detect
from commkit.topology.readers.source import Source, content


class Format(NamedTuple):
    module: str
    function: str
    what: str
    #: Whether one file may describe several fabrics, of which `choose` takes one.
    choices: bool = False


FORMATS: dict[str, Format] = {
    "toml": Format("own", "read_toml", "commkit's own, for people"),
    "json": Format("own", "read_json", "commkit's own, for programs"),
    "slurm-conf": Format("slurm_conf", "read", "Slurm's topology.conf, tree or block"),
    "slurm-yaml": Format("slurm_yaml", "read", "Slurm's topology.yaml", True),
    "topograph": Format("topograph", "read", "topograph's graph of instances"),
    "k8s": Format("k8s", "read", "Kubernetes Nodes, Kueue Topology, Volcano HyperNode", True),
    "ibnetdiscover": Format("ibnetdiscover", "read", "ibnetdiscover's topology file"),
    "iblinkinfo": Format("iblinkinfo", "read", "iblinkinfo, with or without -l"),
    "ec2": Format("ec2", "read", "aws ec2 describe-instance-topology"),
    "gcp": Format("gcp", "read", "gcloud compute instances list --format=json"),
    "netq": Format("netq", "read", "NetQ's topology graph"),
    "lldp": Format("lldp", "read", "lldpcli -f json show neighbors"),
    "nccl-xml": Format("nccl_xml", "read", "NCCL's topology XML: the inside of a host"),
    "nvidia-smi": Format("nvidia_smi", "read", "nvidia-smi topo -m: the inside of a host"),
}

#: In a directory, Slurm reads the first of these and ignores the other.
_SLURM = ("topology.yaml", "topology.conf")


def read(path: str, format: str | None = None, choose: str | None = None) -> Fabric:
    """The fabric that a file describes.

    path     a file; a directory stands for Slurm's topology.yaml or topology.conf in it
    format   a key of FORMATS; None: found by the content
    choose   the name of one topology, where a file has several

    Raises TopologyError (file, line, column), NoTopology where nothing is said about places, and
    UsageError for what cannot be read at all.
    """
    file, note = file_of(path)
    fabric = read_text(content(file), str(file), format, choose)
    return replace(fabric, notes=(note, *fabric.notes)) if note else fabric


def file_of(path: str) -> tuple[Path, str]:
    """The file that `path` stands for, and what there is to say about the choice."""
    file = Path(path)
    note = ""
    if file.is_dir():
        here = [file / name for name in _SLURM if (file / name).is_file()]
        if not here:
            raise UsageError(f"{path}: a directory without {' and '.join(_SLURM)}: expected a file")
        file = here[0]
        if len(here) > 1:
            note = (
                f"{_SLURM[0]} was read; Slurm ignores the {_SLURM[1]} beside it, and so does this"
            )
    elif file.name == _SLURM[1] and file.with_name(_SLURM[0]).is_file():
        note = (
            f"{_SLURM[1]} was read as asked; Slurm ignores it, for there is a {_SLURM[0]} beside it"
        )
    return file, note


def read_text(
    text: str, name: str = "<text>", format: str | None = None, choose: str | None = None
) -> Fabric:
    """As read(), of text; `name` is what errors call it, and a lone host without a name."""
    source = Source(name, text)
    if format is not None and format not in FORMATS:
        raise UsageError(f"format {format!r}: expected one of {', '.join(FORMATS)}")
    try:
        fabric = _read(source, format or detect(source), choose)
    except TopologyError as error:
        # What a Fabric itself refuses does not know where it comes from.
        raise error if str(error).startswith(name) else TopologyError(f"{name}: {error}") from None
    except ValueError as error:
        if "integer string conversion" not in str(error):
            raise
        raise TopologyError(f"{name}: a number of thousands of digits: expected fewer") from None
    return fabric


def _read(source: Source, chosen: str | None, choose: str | None) -> Fabric:
    name = source.name
    if chosen is None:
        raise TopologyError(
            f"{name}: no known topology format; expected one of {', '.join(FORMATS)}: "
            "name it with --format"
        )
    entry = FORMATS[chosen]
    function = getattr(importlib.import_module(f"{__name__}.{entry.module}"), entry.function)
    if choose is not None and not entry.choices:
        raise UsageError(
            f"{name}: a file of format {chosen} has one topology: drop --name {choose}"
        )
    fabric = function(source, choose) if entry.choices else function(source)
    assert isinstance(fabric, Fabric)
    return fabric
