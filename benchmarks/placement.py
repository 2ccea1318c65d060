#!/usr/bin/env python3
"""How good placements are, beside launchers' orders, greedy, METIS and an exact solver.

No network and no GPU: bytes are counted and seconds of communication estimated for fabrics that
exist only here, with flows hashed evenly.  METIS (pymetis) and OR-tools' CP-SAT are used where they
are installed; a bar against one that is not is left out, and a line says so.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import random
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from _bars import Bars
from rich.console import Console
from rich.table import Table

from commkit.topology import baselines, paths
from commkit.topology.placement import place
from commkit.topology.score import Score, Scorer
from commkit.topology.seats import Layer, Seats
from commkit.topology.traffic import Demand, HostFamily, HostGroup

GB = 1e9
#: (name, size, pattern, bytes a step: of a directed edge and rail; of pairs: of a host in all)
Axis = tuple[str, int, str, float]


@dataclass(frozen=True)
class Case:
    """A job on a cluster: logical hosts as a grid, ToRs of `per_tor`, some of them taken."""

    name: str
    gpus: int
    axes: tuple[Axis, ...]
    tors: int
    per_tor: int = 64
    tors_per_pod: int = 8
    uplinks: int = 32
    oversubscription: float = 4.0
    rails: int = 1  #: that share a ToR; 1: each rail has its own, all are alike

    @property
    def hosts(self) -> int:
        return math.prod(size for _, size, _, _ in self.axes)


CASES = {
    "175B": Case(
        "175B: TP8 PP8 DP192",
        12288,
        (("dp", 192, "ring", 10.9 * GB), ("pp", 8, "loop", 1.2 * GB)),
        48,
    ),
    "moe": Case(
        "MoE: TP8 EP8 (all-to-all) EDP8 PP4",
        2048,
        (
            ("ep", 8, "pairs", 12 * GB),
            ("edp", 8, "ring", 4 * GB),
            ("pp", 4, "loop", 1.2 * GB),
        ),
        16,
        per_tor=32,
    ),
    "100k": Case(
        "dense: TP8 CP2 DP392 PP16",
        100352,
        (
            ("cp", 2, "pairs", 6 * GB),
            ("dp", 392, "ring", 8 * GB),
            ("pp", 16, "loop", 1.0 * GB),
        ),
        280,
        tors_per_pod=28,
    ),
    "tree": Case(
        "175B, all-reduce by trees: TP8 PP8 DP192",
        12288,
        (("dp", 192, "tree", 5.45 * GB), ("pp", 8, "line", 1.2 * GB)),
        48,
    ),
}


def demand_of(axes: Sequence[Axis], rails: int = 1) -> Demand:
    """The lines of a grid, the first axis fastest, as rank order has them."""
    hosts = math.prod(size for _, size, _, _ in axes)
    families = []
    stride = 1
    for name, size, pattern, amount in axes:
        share = amount / (size - 1) if pattern == "pairs" and size > 1 else amount
        groups = [
            HostGroup(
                tuple(range(first, first + size * stride, stride)),
                share * rails,
                tuple(range(rails)),
            )
            for first in range(hosts)
            if first // stride % size == 0
        ]
        if size > 1:
            families.append(HostFamily(name, pattern, tuple(groups)))
        stride *= size
    return Demand(hosts, tuple(families))


def seats_of(case: Case, fragmented: bool, seed: int) -> Seats:
    """Hosts as a busy cluster would give them, in its own order: whole ToRs are rare."""
    draw = random.Random(seed)
    if fragmented:
        free = [
            min(case.per_tor, max(1, int(draw.betavariate(1.2, 0.9) * case.per_tor)))
            for _ in range(case.tors)
        ]
        while sum(free) < case.hosts:
            free[draw.randrange(case.tors)] = case.per_tor
    else:
        free = [case.per_tor] * math.ceil(case.hosts / case.per_tor)
    all_ = [t for t, count in enumerate(free) for _ in range(count)]
    taken = sorted(draw.sample(range(len(all_)), case.hosts)) if fragmented else range(case.hosts)
    tors = [all_[i] for i in taken]
    tor = _numbered(tors)
    pod = _numbered([t // case.tors_per_pod for t in tors])
    rate = 50 * GB
    # A pod's uplinks, all ToRs' over the oversubscription.
    core = max(1, round(case.tors_per_pod * case.uplinks / case.oversubscription))
    layers = [Layer(tor, (case.uplinks,) * (max(tor) + 1), rate, case.rails, 1.0, "ToR")]
    if max(pod):
        layers.append(Layer(pod, (core,) * (max(pod) + 1), rate, case.rails, 1.0, "pod"))
    return Seats(case.hosts, tuple(layers), 25 * GB)


def _numbered(groups: Sequence[int]) -> tuple[int, ...]:
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(g, len(numbers)) for g in groups)


def have(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@dataclass(frozen=True)
class Row:
    name: str
    seconds: float
    score: Score


def compare(
    case: Case, fragmented: bool, seed: int, bars: Bars, console: Console
) -> dict[str, Row]:
    """All contenders on one allocation, as a table; ours is "plan"."""
    demand, seats = demand_of(case.axes, case.rails), seats_of(case, fragmented, seed)
    started = time.process_time()
    plan = place(demand, seats)
    rows = {"plan": Row(f"plan ({plan.how})", time.process_time() - started, plan.score)}
    started = time.process_time()
    frugal = place(demand, seats, objective="bytes")
    rows["bytes"] = Row(
        f"plan for bytes ({frugal.how})", time.process_time() - started, frugal.score
    )
    scorer = Scorer(demand, seats)

    def contend(key: str, name: str, make: Any) -> None:
        started = time.process_time()
        host_of = make()
        rows[key] = Row(name, time.process_time() - started, scorer.score(host_of))

    contend("random", "random", lambda: baselines.random_order(case.hosts, 1))
    contend("slurm", "Slurm's order", lambda: baselines.launcher_order(case.hosts))
    contend("greedy", "greedy", lambda: baselines.greedy(demand, seats))
    if have("pymetis"):
        contend("metis", "METIS", lambda: baselines.metis(demand, seats))
    least = scorer.least
    what = "fragmented" if fragmented else "whole ToRs"
    sizes = seats.layers[0].sizes
    table = Table(
        title=f"{case.name}, {case.gpus} GPUs, {what} (seed {seed}): {len(sizes)} ToRs of "
        f"{min(sizes)} to {max(sizes)} hosts, oversubscription {case.oversubscription:g}"
    )
    columns = ["", "s", "cross-ToR / bound", "fullest ToR / bound", "cross-pod / bound"]
    for column in (*columns, "hashed / NIC", "planned / NIC"):
        table.add_column(column, justify="left" if not column else "right")
    for key, row in rows.items():
        score = row.score
        pod = "-"
        if len(score.crossing) > 1:
            pod = f"{score.crossing[1] / least.crossing[1]:.3f}" if least.crossing[1] else "-"
        assert score.hashed is not None and score.planned is not None and least.nic
        table.add_row(
            row.name,
            f"{row.seconds:.2f}",
            f"{score.crossing[0] / least.crossing[0]:.3f}",
            f"{score.fullest[0] / least.fullest[0]:.3f}",
            pod,
            f"{score.hashed / least.nic:.3f}",
            f"{score.planned / least.nic:.3f}",
        )
        bars.keep(
            case=case.name,
            gpus=case.gpus,
            allocation=what,
            seed=seed,
            oversubscription=case.oversubscription,
            contender=key,
            cpu_seconds=row.seconds,
            crossing=score.crossing,
            fullest=score.fullest,
            hashed=score.hashed,
            planned=score.planned,
            least_crossing=least.crossing,
            least_fullest=least.fullest,
            nic=least.nic,
            how="computed",
        )
    console.print(table)
    rows["least"] = Row(
        "bound", 0.0, Score(least.crossing, least.fullest, (), least.nic, least.nic)
    )
    return rows


def exact(bars: Bars, console: Console) -> list[tuple[float, float]]:
    """Toys, solved to the optimum by CP-SAT: (ours, optimum) in bytes that cross ToRs."""
    found = []
    cp_model = importlib.import_module("ortools.sat.python.cp_model")
    toys: list[tuple[tuple[Axis, ...], tuple[int, ...]]] = [
        ((("dp", 8, "ring", 9.0), ("pp", 4, "loop", 1.0)), (3, 5, 7, 8, 9)),
        ((("dp", 6, "ring", 4.0), ("pp", 4, "line", 2.0)), (4, 5, 7, 8)),
        ((("ep", 4, "pairs", 6.0), ("dp", 4, "ring", 3.0)), (3, 3, 5, 5)),
        ((("dp", 12, "ring", 5.0), ("pp", 2, "line", 2.0)), (2, 3, 4, 6, 9)),
    ]
    table = Table(title="Toys: bytes that cross ToRs")
    for column in ("job", "ToRs", "bound", "CP-SAT", "proved", "plan", "Slurm's order"):
        table.add_column(column, justify="right")
    for axes, sizes in toys:
        demand = demand_of(axes)
        tor = tuple(t for t, size in enumerate(sizes) for _ in range(size))
        seats = Seats(demand.hosts, (Layer(tor),))
        plan = place(demand, seats)
        model = cp_model.CpModel()
        at = [[model.new_bool_var("") for _ in sizes] for _ in range(demand.hosts)]
        for host, row in enumerate(at):
            model.add_exactly_one(row)
            for t, variable in enumerate(row):
                model.add_hint(variable, int(tor[plan.host_of[host]] == t))
        for t, size in enumerate(sizes):
            model.add(sum(row[t] for row in at) == size)
        both: dict[tuple[int, int], float] = {}
        for a, b, amount in demand.edges():
            both[min(a, b), max(a, b)] = both.get((min(a, b), max(a, b)), 0.0) + amount
        cost = []
        for (a, b), amount in both.items():
            cut = model.new_bool_var("")
            for t in range(len(sizes)):
                model.add_bool_or([at[a][t].Not(), at[b][t], cut])
                model.add_bool_or([at[b][t].Not(), at[a][t], cut])
            cost.append(round(amount) * cut)
        model.minimize(sum(cost))
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = 20
        solver.parameters.num_workers = 1
        status = solver.solve(model)
        proved = status == cp_model.OPTIMAL
        ours, best = plan.score.crossing[0], solver.objective_value
        table.add_row(
            " x ".join(f"{name}{size}" for name, size, _, _ in axes),
            ",".join(map(str, sizes)),
            f"{plan.least.crossing[0]:.0f}",
            f"{best:.0f}",
            "yes" if proved else "no",
            f"{ours:.0f}",
            f"{plan.given.crossing[0]:.0f}",
        )
        bars.keep(toy=str(axes), sizes=sizes, exact=best, proved=proved, ours=ours, how="computed")
        found.append((ours, best))
    console.print(table)
    return found


def uplinks(bars: Bars, quick: bool) -> tuple[int, float]:
    """(random instances off the bound, CPU seconds for 60,000 flows over 32 uplinks)."""
    draw = random.Random(5)
    off = 0
    for _ in range(100 if quick else 1000):
        leaves, width = draw.randint(2, 16), draw.randint(1, 40)
        flows = [
            (a, b)
            for a, b in (
                (draw.randrange(leaves), draw.randrange(leaves))
                for _ in range(draw.randint(0, 400))
            )
            if a != b
        ]
        assigned = paths.assign(flows, width)
        off += paths.fullest(flows, assigned) != paths.least_fullest(flows, width)
    count = 6_000 if quick else 60_000
    many: list[tuple[int, int]] = []
    while len(many) < count:
        a, b = draw.randrange(192), draw.randrange(192)
        if a != b:
            many.append((a, b))
    started = time.process_time()
    assigned = paths.assign(many, 32)
    seconds = time.process_time() - started
    off += paths.fullest(many, assigned) != paths.least_fullest(many, 32)
    bars.keep(instances_off=off, flows=count, cpu_seconds=seconds, how="computed")
    return off, seconds


def main() -> int:
    bars = Bars("placement", __doc__.partition("\n")[0])
    bars.parser.add_argument("--seeds", type=int, default=3, help="allocations of each case")
    bars.parser.add_argument("--case", choices=list(CASES), action="append")
    options = bars.parse()
    console = Console(width=150)
    for name, module in (("METIS", "pymetis"), ("CP-SAT", "ortools")):
        if not have(module):
            console.print(f"no {name}: pip install {module}")
    seeds = 1 if options.quick else options.seeds
    wanted = options.case or (["moe"] if options.quick else list(CASES))
    results: list[tuple[str, bool, dict[str, Row]]] = []
    for key in wanted:
        for seed in range(7, 7 + seeds):
            results.append((key, True, compare(CASES[key], True, seed, bars, console)))
        results.append((key, False, compare(CASES[key], False, 7, bars, console)))
    if not options.quick and not options.case:
        results += variants(bars, console)
    toys = exact(bars, console) if have("ortools") and not options.case else []
    off, seconds = uplinks(bars, options.quick)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(f"paths: {off} instances off the bound; {seconds:.2f} s; peak {peak:.0f} MiB")
    judge(bars, options, results, toys, off, seconds, peak)
    return bars.finish()


def variants(bars: Bars, console: Console) -> list[tuple[str, bool, dict[str, Row]]]:
    """Other oversubscriptions of the cores; ToRs that all rails of a host share."""
    made = []
    for key, tors, per_tor in (("175B", 96, 32), ("moe", 32, 16)):
        base = CASES[key]
        name = f"{base.name}, 8 rails a ToR"
        case = replace(base, name=name, rails=8, uplinks=128, tors=tors, per_tor=per_tor)
        made.append((key, True, compare(case, True, 13, bars, console)))
    for key in ("175B", "moe"):
        for times in (1.0, 2.0, 8.0):
            case = replace(CASES[key], oversubscription=times)
            made.append((key, True, compare(case, True, 11, bars, console)))
    return made


def judge(
    bars: Bars,
    options: argparse.Namespace,
    results: Sequence[tuple[str, bool, dict[str, Row]]],
    toys: Sequence[tuple[float, float]],
    off: int,
    seconds: float,
    peak: float,
) -> None:
    def ratio(rows: dict[str, Row], key: str, what: str) -> float:
        mine, least = getattr(rows[key].score, what), getattr(rows["least"].score, what)
        return float(mine[0] / least[0])

    def hashed(rows: dict[str, Row], key: str) -> float:
        value = rows[key].score.hashed
        assert value is not None
        return value

    for key in dict.fromkeys(key for key, _, _ in results):
        whole = [rows for k, fragmented, rows in results if k == key and not fragmented]
        broken = [rows for k, fragmented, rows in results if k == key and fragmented]
        name = key.lower()
        both = whole + broken
        if whole and key in ("175B", "moe"):
            worst = max(ratio(rows, "bytes", "crossing") for rows in whole)
            bars.check(f"cross_tor_whole_{name}", round(worst, 6), "<=", 1.0)
        if broken and key == "175B":
            worst = max(ratio(rows, "plan", "crossing") for rows in broken)
            bars.check(f"cross_tor_fragmented_{name}", worst, "<=", 1.12)
        if all("metis" in rows for rows in both):
            # On whole ToRs of the MoE fewest bytes and least time are two placements.
            for plan, cases in (("plan", broken), ("bytes", both)):
                for what in ("crossing", "fullest"):
                    worst = max(ratio(r, plan, what) / ratio(r, "metis", what) for r in cases)
                    bars.check(f"{what}_of_{plan}_over_metis_{name}", round(worst, 6), "<=", 1.0)
        rivals = [k for k in ("metis", "slurm") if all(k in rows for rows in both)]
        worst = max(hashed(r, "plan") / min(hashed(r, k) for k in rivals) for r in both)
        bars.check(f"hashed_over_best_of_{'_'.join(rivals)}_{name}", worst, "<=", 1.02)
        limit = {12288: 2.0, 100352: 30.0}.get(CASES[key].gpus)
        if limit is not None:
            slowest = max(rows["plan"].seconds for rows in both)
            bars.check(f"cpu_seconds_{name}", slowest, "<", limit)
    if toys:
        bars.check("worst_toy_over_exact", max(ours / best for ours, best in toys), "<=", 1.05)
    bars.check("paths_off_the_bound", off, "==", 0)
    if not options.quick:
        bars.check("cpu_seconds_60000_flows", seconds, "<", 5)
    bars.check("peak_mib", peak, "<", 1024)


if __name__ == "__main__":
    sys.exit(main())
