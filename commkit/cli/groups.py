"""`commkit groups`: the groups of a layout, their names and waves, and what creating them costs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

import click
from rich.console import Console
from rich.table import Table

from commkit import cost, plan
from commkit.layout import ORDER, Layout, parse
from commkit.ranks import brief

#: Columns that the tables get even if the terminal, or a pipe, has fewer.
WIDTH = 120


@click.command("groups")
@click.argument("layout", metavar="LAYOUT")
@click.option("--world", required=True, type=int, metavar="N", help="The world size.")
@click.option("--rank", default=0, show_default=True, help="Whose groups are listed by name.")
@click.option(
    "--order",
    default=ORDER,
    show_default=True,
    help="Dimensions, the one whose ranks are neighbours first.",
)
@click.option(
    "--families",
    metavar="WORDS",
    help="What is created: 'megatron', or words such as dp,tp-dp,embd.  [default: the dimensions]",
)
@click.option("--allow-partial", is_flag=True, help="The layout may be smaller than the world.")
@click.option("--dry-run", is_flag=True, help="Also estimate what creating them costs.")
@click.option(
    "--ranks-per-host", default=8, show_default=True, metavar="N", help="For the estimate."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(
    layout: str,
    world: int,
    rank: int,
    order: str,
    families: str | None,
    allow_partial: bool,
    dry_run: bool,
    ranks_per_host: int,
    as_json: bool,
) -> None:
    """Show the groups that LAYOUT, such as tp=8,cp=2,ep=4,pp=8, makes of a world of N ranks.

    Starts nothing and connects to nothing.  Exit code 2 if the layout is wrong.
    """
    made = parse(layout, world, order=order, families=families, allow_partial=allow_partial)
    report = describe(made, rank)
    if dry_run:
        estimate = cost.estimate(made, ranks_per_host=ranks_per_host)
        report["estimate"] = dataclasses.asdict(estimate)
    if as_json:
        click.echo(json.dumps(report))
        return
    console = Console(markup=False, highlight=False, emoji=False)
    console.width = max(console.width, WIDTH)
    console.print(_headline(report), soft_wrap=True)
    console.print(_families(report))
    console.print(f"\nrank {rank}")
    console.print(_groups(report))
    console.print(f"digest {report['digest']}", soft_wrap=True)
    if dry_run:
        console.print("\n" + _summary(estimate, ranks_per_host), soft_wrap=True)
        console.print(_estimate(estimate))


def describe(made: Layout, rank: int) -> dict[str, Any]:
    """What --json prints, without the estimate."""
    mine = plan.make(made, rank, plan.Generations())
    wave_of = {index: wave for wave, indices in enumerate(mine.waves) for index in indices}
    return {
        "world_size": made.world_size,
        "digest": mine.digest.hex(),
        "mesh": {"shape": made.mesh_shape, "names": made.mesh_names},
        "expert_mesh": {"shape": made.expert_mesh_shape, "names": made.expert_mesh_names},
        "waves": len(mine.waves),
        "families": [
            {
                "name": name,
                "groups": family.count,
                "smallest": family.sizes[0],
                "largest": family.sizes[1],
                "waves": family.waves,
                "description": family.describe(),
            }
            for name, family in made.families.items()
        ],
        "rank": rank,
        "groups": [
            {
                "family": group.family,
                "name": group.name,
                "ranks": group.ranks,
                "index": group.index,
                "wave": wave_of[index],
            }
            for index, group in enumerate(mine.groups)
        ],
    }


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        side: Literal["left", "right"] = "right" if column in right else "left"
        # Only a long pattern is folded; a name is there to be copied.
        table.add_column(column, justify=side, overflow="fold", no_wrap=column != "pattern")
    return table


def _headline(report: dict[str, Any]) -> str:
    parts = [f"{report['world_size']:,} ranks"]
    for key, word in (("mesh", "mesh"), ("expert_mesh", "experts' mesh")):
        shape, names = report[key]["shape"], report[key]["names"]
        if names:
            sizes = [f"{name}={size}" for name, size in zip(names, shape, strict=True)]
            parts.append(f"{word} {' x '.join(sizes)}")
    return "; ".join(parts)


def _families(report: dict[str, Any]) -> Table:
    right = ("groups", "ranks each", "waves")
    table = _table("family", *right, "pattern", right=right)
    for family in report["families"]:
        sizes = {family["smallest"], family["largest"]}
        table.add_row(
            family["name"],
            f"{family['groups']:,}",
            "-".join(f"{size:,}" for size in sorted(sizes)),
            str(family["waves"]),
            family["description"],
        )
    return table


def _groups(report: dict[str, Any]) -> Table:
    table = _table("family", "wave", "index", "ranks", "name", right=("wave", "index"))
    for group in report["groups"]:
        table.add_row(
            group["family"],
            str(group["wave"]),
            str(group["index"]),
            brief(group["ranks"], 32),
            group["name"],
        )
    return table


def _summary(estimate: cost.Cost, ranks_per_host: int) -> str:
    few, most = estimate.communicators
    return (
        f"estimate: {estimate.groups:,} groups, {estimate.hosts:,} hosts of {ranks_per_host}; "
        f"NCCL communicators of a rank: {few if few == most else f'{few} to {most}'}, "
        f"up to {estimate.single} of them without another rank"
    )


def _estimate(estimate: cost.Cost) -> Table:
    right = ("connections", "messages", "bytes")
    table = _table("busiest process", *right, right=right)
    rows = {
        "commkit": estimate.commkit,
        "torch": estimate.torch,
        "torch, barrier=1": estimate.barrier,
    }
    for who, load in rows.items():
        table.add_row(
            f"{who}: {load.process}",
            f"{load.connections:,}",
            f"{load.messages:,}",
            f"{load.bytes:,}",
        )
    return table
