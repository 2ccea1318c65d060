"""`commkit env`: what this process understands of its launcher, from which variable, and doubts."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from commkit import container, launch
from commkit.endpoint import Endpoint
from commkit.settings import VARIABLES, load


@click.command("env")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--settings", "show_settings", is_flag=True, help="List the COMMKIT_* variables.")
def command(as_json: bool, show_settings: bool) -> None:
    """Show what this process understands of its launcher's environment.

    Starts nothing and connects to nothing: run it in place of the training script, under the same
    torchrun, srun or mpiexec.  Exit code 3 if the environment does not describe a world.
    """
    if show_settings:
        _print_settings(as_json)
        return
    report = describe()
    if as_json:
        click.echo(json.dumps(report))
        return
    table = _table("field", "value", "from")
    for field, (value, origin) in report["fields"].items():
        table.add_row(field.replace("_", " "), "?" if value is None else str(value), origin)
    console = _console()
    console.print(table)
    for kind in ("ignored", "doubts"):
        for line in report[kind]:
            console.print(f"{kind.rstrip('s')}: {line}", style="yellow", soft_wrap=True)


def describe() -> dict[str, Any]:
    """fields: name -> (value, where it comes from); ignored and doubts: lines."""
    settings = load()
    spec = launch.resolve(settings=settings)
    gpus = container.visible_devices()
    memory = container.shared_memory()
    found_out = "not said: the agents find it out"
    identity = f"COMMKIT_HOST_ID={settings.host_id}" if settings.host_id else "/proc"

    def origin(name: str, value: object) -> str:
        return spec.origins.get(name, found_out if value is None else "")

    fields: dict[str, tuple[object, str]] = {
        name: (getattr(spec, name), origin(name, getattr(spec, name)))
        for name in ("rank", "world_size", "local_rank", "local_world_size")
    }
    fields = {"launcher": (spec.launcher, "variables that are set"), **fields}
    if settings.launcher:
        fields["launcher"] = (spec.launcher, f"COMMKIT_LAUNCHER={settings.launcher}")
    fields["host"] = (f"{spec.host.hostname} ({spec.host.key})", identity)
    fields["root"] = (_root(spec), spec.origins.get("root", ""))
    fields["job_id"] = (spec.job_id, spec.origins.get("job_id", "not said"))
    fields["patient_dns"] = (spec.patient_dns, "Kubernetes" if spec.patient_dns else "")
    fields["gpus"] = (
        "all" if gpus is None else ",".join(gpus) or "none",
        "CUDA_VISIBLE_DEVICES" + (" is not set" if gpus is None else ""),
    )
    doubts = list(spec.doubts)
    if memory is not None:
        free = f"{memory.free / 1e6:.0f} of {memory.size / 1e6:.0f} MB free"
        fields["shared_memory"] = (free, memory.path)
        doubts += filter(None, [memory.doubt(spec.local_world_size or 1)])
    return {"fields": fields, "ignored": list(spec.ignored), "doubts": doubts}


def _root(spec: launch.LaunchSpec) -> str:
    root = spec.root
    if root.kind == "endpoint":
        host, percent, scope = root.host.partition("%")
        first = str(Endpoint(host, root.ports[0], scope if percent else ""))
        rest = "".join(f", {port}" for port in root.ports[1:])
        where = {None: "on rank 0's host", True: "on this host", False: "on another host"}
        return f"{first}{rest}, {where[root.here]}"
    if root.kind == "elastic":
        return f"published in torchrun's store at {Endpoint(root.host, root.ports[0])}"
    if root.kind == "file":
        return f"written into {root.path}"
    return {"local": "on this host", "mpi": "told by rank 0 (MPI_Bcast)"}[root.kind]


def _print_settings(as_json: bool) -> None:
    if as_json:
        names = ("accepts", "default", "meaning")
        click.echo(json.dumps({k: dict(zip(names, v, strict=True)) for k, v in VARIABLES.items()}))
        return
    table = _table("variable", "accepts", "default", "meaning")
    for name, row in VARIABLES.items():
        table.add_row(name, *row)
    _console().print(table)


def _table(*columns: str) -> Table:
    table = Table()
    for name in columns:
        table.add_column(name, overflow="fold")  # a value cut short would be a wrong value
    return table


def _console() -> Console:
    # Values are users' text: no markup, no highlighting; a log file gets lines of any length.
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 200
    return console
