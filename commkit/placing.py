"""A layout, a fabric and a list of hosts -> a placement, and all there is to say about it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from commkit.errors import TopologyError, UsageError
from commkit.layout import ORDER, Layout, parse
from commkit.topology import baselines, emit
from commkit.topology.fabric import Fabric
from commkit.topology.hostlist import expand
from commkit.topology.model import Model, Work, work
from commkit.topology.paths import Advice, advice
from commkit.topology.placement import Plan, place
from commkit.topology.readers.source import content
from commkit.topology.repair import repair
from commkit.topology.score import Score, Scorer
from commkit.topology.seats import Seats, seats_of
from commkit.topology.traffic import COLLECTIVES, Demand, Family, demand

#: What is assumed where neither a model nor sizes are given.
ASSUMED = Model(parameters=175e9, layers=96, hidden=12288, sequence=2048)
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{u}i": 1 << 10 * k for k, u in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Wish:
    """What a user asks for.  `work` says what families do; else `model` does, else ASSUMED."""

    hosts: tuple[str, ...]
    layout: str | Layout
    ranks_per_host: int = 8
    order: str = ORDER
    work: Mapping[str, Work] | None = None
    model: Model | None = None
    objective: str = "time"
    queue_pairs: int = 1
    uplinks: int | None = None
    uplink_gbps: float | None = None
    nic_gbps: float | None = None
    contenders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placed:
    """The answer; hosts[logical host] and what it is compared with."""

    wish: Wish
    plan: Plan
    seats: Seats
    baselines: tuple[tuple[str, Score], ...]
    notes: tuple[str, ...]
    #: (family, flows of the busiest leaf group and rail, its uplinks)
    flows: tuple[tuple[str, int, int | None], ...]

    @property
    def hosts(self) -> list[str]:
        return [self.wish.hosts[physical] for physical in self.plan.host_of]

    def emit(self, form: str) -> str:
        return emit.emit(form, self.plan.host_of, self.wish.hosts, self.wish.ranks_per_host)

    @property
    def digest(self) -> str:
        wish = self.wish
        return emit.permutation(self.plan.host_of, wish.hosts, wish.ranks_per_host).digest

    def report(self) -> dict[str, Any]:
        """What `commkit place --json` prints."""
        plan = self.plan
        return {
            "hosts": self.hosts,
            "how": plan.how,
            "layers": [layer.name for layer in self.seats.layers],
            "score": asdict(plan.score),
            "bound": asdict(plan.least),
            "gaps": [None if math.isinf(gap) else gap for gap in plan.gaps],
            "baselines": {name: asdict(score) for name, score in self.baselines},
            "flows": [list(row) for row in self.flows],
            "notes": list(self.notes),
            "digest": self.digest,
        }

    def advice(self, kind: str) -> list[Advice]:
        """What to do about collisions on a fabric of this kind; see paths.advice."""
        crossing = [s > 0 for s in self.plan.score.crossing]
        tiers = 1 + max((k + 1 for k, crosses in enumerate(crossing) if crosses), default=0)
        _, flows, uplinks = max(self.flows, key=lambda row: row[1], default=("", 0, None))
        return advice(fabric=kind, tiers=tiers, flows=flows, uplinks=uplinks or 0)


def host_names(text: str) -> tuple[str, ...]:
    """Slurm's notation, or @FILE with a host a line, `host:slots` and comments allowed."""
    if not text.startswith("@"):
        return tuple(expand(text))
    path = Path(text[1:])
    try:
        lines = content(path).splitlines()
    except UsageError as error:
        raise UsageError(f"--hosts @{error}") from None
    names = [line.partition("#")[0].split() for line in lines]
    found = tuple(words[0].partition(":")[0] for words in names if words)
    if not found:
        raise UsageError(f"--hosts {text}: no host in it: expected a host a line")
    return found


def parse_work(texts: Sequence[str]) -> dict[str, Work]:
    """`dp=all_reduce:10.9G`, `dp=all_reduce/tree:10.9G`, `pp=send_recv/loop:150Mi`."""
    found: dict[str, Work] = {}
    for text in texts:
        match = re.fullmatch(
            r"(?P<family>[\w-]+)=(?P<collective>\w+)(?:/(?P<algorithm>\w+))?:(?P<size>[^:]+)", text
        )
        if not match:
            known = ", ".join(dict.fromkeys(c for c, _ in COLLECTIVES))
            raise UsageError(
                f"--traffic {text}: expected FAMILY=COLLECTIVE[/ALGORITHM]:BYTES, such as "
                f"dp=all_reduce:10.9G, with one of {known}"
            )
        if match["family"] in found:
            raise UsageError(f"--traffic {text}: {match['family']} is given twice")
        size = parse_bytes(match["size"], f"--traffic {text}")
        found[match["family"]] = Work(match["collective"], size, match["algorithm"] or "")
    return found


def parse_bytes(text: str, where: str) -> float:
    """10.9G is 10.9e9, 150Mi is 150 * 2**20."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([KMGT]i?|)B?", text)
    try:
        if match:
            return float(match[1]) * UNITS[match[2]]
    except ValueError:
        pass
    raise UsageError(f"{where}: {text!r} bytes: expected a number, with K, M, G, T or Ki to Ti")


def parse_model(text: str) -> Model:
    """`parameters=175e9,layers=96,hidden=12288,sequence=2048` and the other fields of Model."""
    known = {field.name: field for field in fields(Model)}
    given: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not equals or name not in known:
            raise UsageError(f"--model {item!r}: expected NAME=NUMBER, NAME of {', '.join(known)}")
        try:
            number: float = float(value)
        except ValueError:
            raise UsageError(f"--model {item!r}: {value!r} is no number") from None
        if known[name].type == "int":
            if not number.is_integer():
                raise UsageError(f"--model {item!r}: expected a whole number")
            number = int(number)
        given[name] = number
    missing = [n for n in ("parameters", "layers", "hidden", "sequence") if n not in given]
    if missing:
        raise UsageError(f"--model {text!r}: {', '.join(missing)} missing: expected {missing[0]}=N")
    return Model(**given)


def families(wish: Wish) -> tuple[list[Family], list[str]]:
    """The families of a layout with what they do, and notes about what was assumed."""
    world = len(wish.hosts) * wish.ranks_per_host
    whole = wish.layout
    if isinstance(whole, str):
        whole = parse(whole, world, order=wish.order)
    sizes = {name: family.sizes[1] for name, family in whole.families.items()}
    notes: list[str] = []
    wanted = wish.work
    if wanted is None:
        model = wish.model
        if model is None:
            model = ASSUMED
            notes.append(
                f"no sizes given: assumed a model of {model.parameters:.3g} parameters, "
                f"{model.layers} layers, hidden {model.hidden}, sequence {model.sequence}; say "
                "--model or --traffic"
            )
        wanted = work(model, sizes)
        if "ep" in sizes and "ep" not in wanted:
            notes.append("ep: nothing is known of the experts; say --model expert_layers=...")
        if sizes.get("cp", 1) > 1 and "dp" in wanted:
            # Whoever holds the same parameters shares gradients: cp is part of that group.
            wanted = {("dp-cp" if name == "dp" else name): do for name, do in wanted.items()}
    named = _named(wish, whole, world, list(wanted))
    made = []
    for name, do in wanted.items():
        groups = tuple(group for group in named[name] if len(group) > 1) if name in named else ()
        if groups:
            made.append(Family(name, groups, do.collective, do.size, do.algorithm))
    if not made:
        shown = wish.layout if isinstance(wish.layout, str) else ", ".join(whole.families)
        raise UsageError(
            f"layout {shown}: no family of known traffic has a group of two ranks: there is "
            "nothing to place"
        )
    return made, notes


def _named(wish: Wish, whole: Layout, world: int, names: list[str]) -> Any:
    if not isinstance(wish.layout, str) or all(name in whole for name in names):
        return whole
    return parse(wish.layout, world, order=wish.order, families=",".join(names))


def placed(wish: Wish, fabric: Fabric) -> Placed:
    """Place `wish` on `fabric`.

    Raises UsageError for what does not fit together, TopologyError for hosts without a common
    network, NoTopology where the fabric says nothing about any of the hosts.
    """
    _check(wish)
    job = fabric.select(wish.hosts)
    some, notes = families(wish)
    seats = seats_of(
        job, uplinks=wish.uplinks, uplink_gbps=wish.uplink_gbps, nic_gbps=wish.nic_gbps
    )
    wanted = demand(some, [wish.ranks_per_host] * len(wish.hosts))
    plan = place(
        wanted,
        seats,
        others=[(name, baselines.CONTENDERS[name]) for name in wish.contenders],
        queue_pairs=wish.queue_pairs,
        objective=wish.objective,
    )
    scorer = Scorer(wanted, seats, wish.queue_pairs)
    positions = [fabric.host_index.get(name, len(fabric.hosts)) for name in wish.hosts]
    compared = {
        "launcher": plan.given,
        "Slurm": scorer.score(baselines.table_order(positions)),
        "names": scorer.score(baselines.natural_order(wish.hosts)),
        "random": scorer.score(baselines.random_order(len(wish.hosts))),
    }
    if not seats.layers:
        notes.append("all hosts are under one switch: every order is as good")
    elif not seats.known_links:
        notes.append(
            "uplinks or speeds are not known: no time is estimated; say --uplinks, --uplink-gbps "
            "and --nic-gbps"
        )
    notes += [note for note in job.notes if note not in fabric.notes]
    notes += _inside(some, wish, wanted, fabric)
    return Placed(
        wish,
        plan,
        seats,
        tuple(compared.items()),
        tuple(notes),
        tuple(scorer.busiest(plan.host_of)),
    )


def _check(wish: Wish) -> None:
    """Numbers that nothing can be computed with: 0, below 0, infinite, NaN, absurd."""
    for name, value, most in (
        ("--ranks-per-host", wish.ranks_per_host, 1024),
        ("--queue-pairs", wish.queue_pairs, 128),  # NCCL's own limit
        ("--uplinks", wish.uplinks, 65536),
    ):
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{name} {value}: expected 1 to {most}")
    for name, speed in (("--uplink-gbps", wish.uplink_gbps), ("--nic-gbps", wish.nic_gbps)):
        if speed is not None and not 0.001 <= speed <= 1e6:
            raise UsageError(f"{name} {speed}: expected 0.001 to 1000000")


def _inside(some: Sequence[Family], wish: Wish, wanted: Demand, fabric: Fabric) -> list[str]:
    """Remarks about families that should not leave hosts, and rails."""
    notes = []
    for family in some:
        if family.name != "tp":
            continue
        over = sum(len({r // wish.ranks_per_host for r in group}) > 1 for group in family.groups)
        if over:
            notes.append(
                f"tp: {over} of {len(family.groups)} groups cross hosts of "
                f"{wish.ranks_per_host} ranks: tensor parallelism belongs inside a host"
            )
    if wanted.forwarded and len(fabric.rails) > 1:
        notes.append(
            f"{wanted.forwarded:.3g} bytes a step join different local ranks: they cross rails, or "
            "are forwarded inside hosts (NCCL's PXN)"
        )
    return notes


@dataclass(frozen=True)
class Repaired:
    """host_of is an index into `names`, the job's hosts in rank order and then the spares."""

    wish: Wish
    names: tuple[str, ...]
    host_of: tuple[int, ...]
    moved: tuple[str, ...]  #: surviving hosts that take on other ranks
    before: Score
    after: Score

    @property
    def hosts(self) -> list[str]:
        """By logical host."""
        return [self.names[seat] for seat in self.host_of]

    @property
    def changes(self) -> list[tuple[str, str, str]]:
        """(ranks, their host until now, their new host)."""
        each = self.wish.ranks_per_host
        rows = rank_ranges(self.hosts, each, len(self.hosts))
        return [
            (ranks, old, new)
            for (ranks, new), old in zip(rows, self.wish.hosts, strict=True)
            if new != old
        ]

    def emit(self, form: str) -> str:
        """For a launcher that is started on the remaining hosts, lost places filled by spares."""
        given = [old if old in set(self.hosts) else "" for old in self.wish.hosts]
        fresh = iter([host for host in self.hosts if host not in set(self.wish.hosts)])
        given = [host or next(fresh) for host in given]
        index = {host: i for i, host in enumerate(given)}
        order = [index[host] for host in self.hosts]
        return emit.emit(form, order, given, self.wish.ranks_per_host)

    def report(self) -> dict[str, Any]:
        return {
            "hosts": self.hosts,
            "moved": list(self.moved),
            "before": asdict(self.before),
            "after": asdict(self.after),
        }


def repaired(
    wish: Wish, fabric: Fabric, lost: Sequence[str], spares: Sequence[str], moves: int
) -> Repaired:
    """wish.hosts is the order of the running job; `spares` take the places of `lost`."""
    _check(wish)
    if moves < 0:
        raise UsageError(f"--moves {moves}: expected 0 or more")
    for name in lost:
        if name not in wish.hosts:
            raise UsageError(f"--lost {name}: not one of --hosts")
    for name in spares:
        if name in wish.hosts:
            raise UsageError(f"--spare {name}: already one of --hosts")
    names = [*wish.hosts, *spares]
    job = fabric.select(names)
    homeless = [names[i] for i in job.unplaced if names[i] not in lost]
    if homeless:
        raise TopologyError(f"{', '.join(homeless[:8])}: no place in the topology")
    seats = seats_of(
        job, uplinks=wish.uplinks, uplink_gbps=wish.uplink_gbps, nic_gbps=wish.nic_gbps
    )
    some, _ = families(wish)
    wanted = demand(some, [wish.ranks_per_host] * len(wish.hosts))
    index = {name: seat for seat, name in enumerate(names)}
    fixed = repair(
        wanted,
        seats,
        range(len(wish.hosts)),
        [index[name] for name in lost],
        [index[name] for name in spares],
        moves,
    )
    scorer = Scorer(wanted, seats, wish.queue_pairs)
    return Repaired(
        wish,
        tuple(names),
        fixed.host_of,
        tuple(wish.hosts[host] for host in fixed.moved),
        scorer.score(range(len(wish.hosts))),
        scorer.score(fixed.host_of),
    )


def rank_ranges(hosts: Sequence[str], ranks_per_host: int, most: int) -> list[tuple[str, str]]:
    """("0-7", host) of the first `most` hosts."""
    rows = []
    for logical, host in enumerate(itertools.islice(hosts, most)):
        first = logical * ranks_per_host
        last = first + ranks_per_host - 1
        rows.append((str(first) if first == last else f"{first}-{last}", host))
    return rows
