"""`commkit topo probe`: the ways of packets from this host, the hash behind them, collisions."""

from __future__ import annotations

import ipaddress
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from commkit import errors
from commkit.errors import CommkitError, UsageError
from commkit.topology import measured
from commkit.topology.ecmp import ROCE_PORT, TCP, UDP, FiveTuple
from commkit.topology.probe import Answer, probe, source_address, spreading, stages

PROTOCOLS = {"udp": UDP, "tcp": TCP}
#: Source ports are drawn from here up: where RoCEv2's are.
FIRST_PORT = 0xC000
MOST_SEEDS = 1024


@click.command("probe")
@click.argument("destinations", metavar="ADDRESS...", nargs=-1)
@click.option(
    "--ports",
    default=64,
    show_default=True,
    metavar="N",
    help="Source ports to try, out of those from --first-port to 65535.",
)
@click.option(
    "--first-port", default=FIRST_PORT, show_default=True, metavar="PORT", help="Lowest to try."
)
@click.option("--port", "to_port", default=ROCE_PORT, show_default=True, help="At ADDRESS.")
@click.option("--protocol", type=click.Choice(list(PROTOCOLS)), default="udp", show_default=True)
@click.option("--source", metavar="ADDRESS", help="Of this host; else what its routes choose.")
@click.option("--ttl", type=int, metavar="N", help="The hop that tells ways apart; else found.")
@click.option("--timeout", default=0.5, show_default=True, metavar="SECONDS", help="Of a probe.")
@click.option("--tries", default=3, show_default=True, metavar="N", help="Of silent probes.")
@click.option("--seeds", metavar="N,N-N", help="Seeds of hashes to try, such as 1-64.")
@click.option(
    "--flow",
    "flows",
    multiple=True,
    metavar="[SOURCE,]SPORT,ADDRESS,DPORT",
    help="A planned flow, from here or from a host of --add; or @FILE with one a line.",
)
@click.option("--add", multiple=True, metavar="FILE", help="What other hosts wrote with --output.")
@click.option("--output", metavar="FILE", help="Write the measurements as JSON.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--check", is_flag=True, help="Exit 1 if planned flows are not spread evenly.")
def command(
    destinations: tuple[str, ...],
    ports: int,
    first_port: int,
    to_port: int,
    protocol: str,
    source: str | None,
    ttl: int | None,
    timeout: float,
    tries: int,
    seeds: str | None,
    flows: tuple[str, ...],
    add: tuple[str, ...],
    output: str | None,
    as_json: bool,
    check: bool,
) -> int:
    """Find out which uplink packets to ADDRESS take, by source port.

    Sends packets that die on the way and reads which router says so; needs no privilege, and
    routers that answer.  From the ways it finds the hash, if it is one of those known, and says
    which planned flows share an uplink and which source ports would spread them.

    Exit code 1: no router answered where ways part, or with --check planned flows collide.
    """
    if not destinations:
        raise UsageError("topo probe: expected the address of another host")
    for to in destinations:
        _check_address(to)
    if ports < 1 or not 1 <= first_port <= first_port + ports - 1 <= 0xFFFF:
        raise UsageError(f"--first-port {first_port} --ports {ports}: expected ports up to 65535")
    if timeout <= 0 or tries < 1:
        raise UsageError(f"--timeout {timeout:g} --tries {tries}: expected above 0, and 1 or more")
    kind = PROTOCOLS[protocol]
    candidates = measured.Candidates(_seeds(seeds) if seeds else ())
    lines = _lines(flows)
    planned = [_planned(text, kind, source) for text in lines]
    others = measured.merged(measured.from_json(_read(path), path) for path in add)
    # Neighbouring ports differ in a few low bits, which a linear hash may not even look at.
    drawn = sorted(random.Random(0).sample(range(first_port, 0x10000), ports))
    wanted = [
        FiveTuple(source or source_address(to), to, kind, port, to_port)
        for to in destinations
        for port in drawn
    ]
    here = {flow.source for flow in wanted}
    here |= {flow.source for text, flow in zip(lines, planned, strict=True) if text.count(",") < 3}
    wanted = list(dict.fromkeys([*wanted, *(flow for flow in planned if flow.source in here)]))
    hops: list[list[Answer]] = []
    if ttl is None:
        hops = stages(wanted, seconds=timeout, tries=tries)
        ttl = spreading(hops)
        answers = next((some for some in hops if some[0].ttl == ttl), [])
        if ttl is None and others:
            raise UsageError("--add: the ways from here do not part; say --ttl")
    else:
        answers = probe(wanted, ttl, seconds=timeout, tries=tries)
        hops = [answers]
    paths = {a.flow: a.by for a in answers if a.how == "hop" and a.by is not None}
    if output is not None:
        _write(output, json.dumps(measured.to_json(paths)) + "\n")
    if not paths and not any(a.how == "arrived" for a in hops[-1]):
        raise CommkitError(
            f"no router answered probes to {', '.join(destinations)} at TTL {ttl or len(hops)}: "
            "expected ICMP time exceeded; is it filtered, or limited to few a second (--timeout, "
            "--tries)?"
        )
    leaves = measured.leaves_of({**others, **paths}, candidates) if paths else []
    plans = _plans(leaves, planned)
    if as_json:
        click.echo(json.dumps(_report(hops, ttl, leaves, plans)))
    else:
        _print(hops, ttl, leaves, plans)
    return errors.EXIT_THRESHOLD if check and any(p.collides for p in plans) else errors.EXIT_OK


def _plans(leaves: Sequence[measured.Leaf], planned: Sequence[FiveTuple]) -> list[measured.Planned]:
    """Planned flows by the leaf that they leave; UsageError for one whose leaf is not known."""
    known = {source for leaf in leaves for source in leaf.sources}
    for flow in planned:
        if leaves and flow.source not in known:
            raise UsageError(
                f"--flow from {flow.source}: expected a source that was probed here, or one of the "
                "measurements of --add"
            )
    by_leaf = [(leaf, [flow for flow in planned if flow.source in leaf.sources]) for leaf in leaves]
    return [measured.plan(leaf, flows) for leaf, flows in by_leaf if flows]


def _seeds(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match or not 0 < int(match[1]) <= int(match[2] or match[1]) < 1 << 32:
            raise UsageError(f"--seeds {part!r}: expected N or N-N, 1 to 4294967295")
        low, high = int(match[1]), int(match[2] or match[1])
        if len(found) + high - low >= MOST_SEEDS:
            raise UsageError(f"--seeds {text}: expected {MOST_SEEDS} seeds at most")
        found += range(low, high + 1)
    return tuple(dict.fromkeys(found))


def _lines(texts: Sequence[str]) -> list[str]:
    found: list[str] = []
    for text in texts:
        if text.startswith("@"):
            found += [line for line in _read(text[1:]).splitlines() if line.strip()]
        else:
            found.append(text)
    return found


def _planned(text: str, protocol: int, source: str | None) -> FiveTuple:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 4:
        source = parts.pop(0)
        _check_address(source)
    if len(parts) != 3 or not parts[0].isdecimal() or not parts[2].isdecimal():
        raise UsageError(
            f"--flow {text}: expected [SOURCE,]SOURCE PORT,ADDRESS,PORT: 50000,10.0.0.2,4791"
        )
    to = parts[1]
    _check_address(to)
    return FiveTuple(source or source_address(to), to, protocol, int(parts[0]), int(parts[2]))


def _check_address(text: str) -> None:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise UsageError(f"{text!r}: expected an IPv4 or IPv6 address") from None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or 'no text'}") from None


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror}") from None


def _report(
    hops: Sequence[Sequence[Answer]],
    ttl: int | None,
    leaves: Sequence[measured.Leaf],
    plans: Sequence[measured.Planned],
) -> dict[str, Any]:
    return {
        "ttl": ttl,
        "hops": [{"ttl": some[0].ttl, **_counted(some)} for some in hops],
        "leaves": [
            {"uplinks": list(leaf.uplinks), "hash": leaf.name, "why": leaf.why, **_spread(leaf)}
            for leaf in leaves
        ],
        "planned": [
            {
                "fullest": plan.fullest,
                "even": plan.even,
                "unknown": len(plan.unknown),
                "flows": [
                    {
                        **_words(flow),
                        "uplink": plan.leaf.uplinks[index],
                        "port": plan.ports.get(flow),
                    }
                    for index, row in enumerate(plan.flows)
                    for flow in row
                ],
            }
            for plan in plans
        ],
    }


def _words(flow: FiveTuple) -> dict[str, Any]:
    return {
        "source": flow.source,
        "source_port": flow.source_port,
        "destination": flow.destination,
        "destination_port": flow.destination_port,
    }


def _counted(answers: Sequence[Answer]) -> dict[str, Any]:
    how = Counter(answer.how for answer in answers)
    by = Counter(answer.by for answer in answers if answer.how == "hop")
    return {"how": dict(how), "routers": dict(by)}


def _spread(leaf: measured.Leaf) -> Mapping[str, Any]:
    rows = Counter(leaf.paths.values())
    return {"flows": [rows[index] for index in range(len(leaf.uplinks))]}


def _print(
    hops: Sequence[Sequence[Answer]],
    ttl: int | None,
    leaves: Sequence[measured.Leaf],
    plans: Sequence[measured.Planned],
) -> None:
    for some in hops:
        counted = _counted(some)
        routers = [f"{by} ({count})" for by, count in sorted(counted["routers"].items())]
        others = [f"{count} {how}" for how, count in counted["how"].items() if how != "hop"]
        click.echo(f"hop {some[0].ttl}: {', '.join([*routers, *others])}")
    if ttl is None:
        click.echo("every flow takes the same way")
    for leaf in leaves:
        click.echo(
            f"{len(leaf.uplinks)} uplinks, {len(leaf.paths)} flows measured; hash: {leaf.name}"
            + (f" ({leaf.why})" if leaf.why else "")
        )
    for plan in plans:
        _print_plan(plan)


def _print_plan(plan: measured.Planned) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("source", "port", "destination", "uplink", "better port"):
        table.add_column(column, justify="right" if "port" in column else "left")
    for index, row in enumerate(plan.flows):
        for flow in row:
            port = plan.ports.get(flow, flow.source_port)
            table.add_row(
                flow.source,
                str(flow.source_port),
                f"{flow.destination} {flow.destination_port}",
                plan.leaf.uplinks[index],
                "" if port == flow.source_port else str(port),
            )
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, 100)
    console.print(table)
    click.echo(f"fullest uplink: {plan.fullest} planned flows, {plan.even} if spread evenly")
    if plan.unknown:
        click.echo(f"{len(plan.unknown)} planned flows: way not known, no answer")
    if plan.collides and not plan.ports:
        click.echo("no ports known that spread them: probe more (--ports)")
