"""`commkit topo lab`: a job on a leaf-spine fabric of network namespaces, and what it sent up."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from commkit.errors import UsageError
from commkit.topology import lab_job, netns
from commkit.topology.hostlist import expand
from commkit.topology.lab import Lab
from commkit.topology.writers import write


@click.command("lab", context_settings={"allow_interspersed_args": False})
@click.option("--leaves", default=2, show_default=True, metavar="N")
@click.option("--spines", default=2, show_default=True, metavar="N")
@click.option("--hosts-per-leaf", default=2, show_default=True, metavar="N")
@click.option(
    "--rails", default=1, show_default=True, metavar="N", help="NICs a host, a leaf for each."
)
@click.option("--rail-only", is_flag=True, help="Each rail has spines of its own, too.")
@click.option("--host-mbit", type=float, metavar="MBIT", help="Shape the hosts' cables.")
@click.option("--uplink-mbit", type=float, metavar="MBIT", help="Shape the leaves' cables.")
@click.option("--no-ipv6", is_flag=True, help="IPv4 only.")
@click.option("--seed", default=1, show_default=True, metavar="N", help="Of the leaves' hashes.")
@click.option("--hosts", metavar="LIST", help="The job's hosts in rank order: h[0,2,1,3].")
@click.option("--ranks-per-host", default=1, show_default=True, metavar="N")
@click.option("--topology", metavar="FILE", help="Write the fabric as TOML before CMD starts.")
@click.option("--report", metavar="FILE", help="Write bytes and exit status as JSON.")
@click.option("--sweep", is_flag=True, help="Only remove what killed labs have left.")
@click.argument("job", nargs=-1, metavar="[-- CMD...]", type=click.UNPROCESSED)
def command(
    leaves: int,
    spines: int,
    hosts_per_leaf: int,
    rails: int,
    rail_only: bool,
    host_mbit: float | None,
    uplink_mbit: float | None,
    no_ipv6: bool,
    seed: int,
    hosts: str | None,
    ranks_per_host: int,
    topology: str | None,
    report: str | None,
    sweep: bool,
    job: tuple[str, ...],
) -> int | None:
    """Run CMD on every host of a fabric made of network namespaces.  Needs root.

    CMD runs once for each rank, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as
    env:// wants them, on hosts h0, h1, ... with names and routes of their own.  Its output is not
    touched.  At the end the bytes that each leaf has sent to each spine are printed on standard
    error, and everything is removed.

    The exit status is that of the first rank that fails.
    """
    if sweep:
        if job:
            raise UsageError("topo lab: --sweep runs no command")
        for name in netns.sweep():
            click.echo(f"removed {name}")
        return None
    if not job:
        raise UsageError("topo lab: expected a command behind --, such as -- python train.py")
    made = Lab(
        leaves,
        spines,
        hosts_per_leaf,
        rails=rails,
        rail_only=rail_only,
        host_mbit=host_mbit,
        uplink_mbit=uplink_mbit,
        ipv6=not no_ipv6,
        seed=seed,
    )
    chosen = lab_job.hosts_named(made, expand(hosts)) if hosts else list(made.hosts)
    if topology:
        _write(topology, "--topology", write(made.fabric(), "toml"))
    with lab_job.ended_by(signal.SIGTERM, signal.SIGHUP), made:
        before = made.uplink_bytes()
        status, failed = lab_job.wait(made, lab_job.start(made, job, chosen, ranks_per_host))
        rows = [
            {
                "leaf": made.shape.leaf(group, rail),
                "spine": made.shape.spine(spine, rail),
                "sent": sent - before[group, rail, spine][0],
                "received": received - before[group, rail, spine][1],
            }
            for (group, rail, spine), (sent, received) in sorted(made.uplink_bytes().items())
        ]
    if report:
        _write(report, "--report", json.dumps({"status": status, "uplinks": rows}) + "\n")
    _print(rows)
    if status:
        host = chosen[failed // ranks_per_host].name
        click.echo(f"commkit: rank {failed} on {host} ended with status {status}", err=True)
    return status


def _write(path: str, option: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("leaf", "spine", "bytes up", "bytes down"):
        table.add_column(column, justify="right" if column.startswith("bytes") else "left")
    for row in rows:
        table.add_row(row["leaf"], row["spine"], f"{row['sent']:,}", f"{row['received']:,}")
    Console(stderr=True, highlight=False).print(table)
