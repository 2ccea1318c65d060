"""nccl-tests' -J.  It keeps its whole environment; of that, only what is on our list is read."""

from __future__ import annotations

import json
import re
import statistics
from datetime import datetime, timezone
from typing import Any

from commkit.bench.formats.nccl_text import PROGRAMS, nccl_version
from commkit.bench.formats.reading import Given, Reading, Spread, identifier, record
from commkit.errors import UsageError
from commkit.records import Measurement, kept_environment

#: 3 came with -I's statistics.
NEWEST = 3


def looks_like(text: str) -> bool:
    start = text.lstrip()[:4096]
    return start.startswith("{") and re.match(r'\{\s*"version"\s*:', start) is not None


def read(text: str, given: Given) -> Reading:
    """Raises UsageError for what is no whole JSON, or not as nccl-tests writes it."""
    try:
        values: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise given.wrong(
            error.lineno,
            f"not JSON at column {error.colno}: {error.msg}; a run that was killed does not "
            "finish its file: read its text output",
        ) from None
    version = values.get("version")
    if not isinstance(version, int) or version < 1:
        raise UsageError(
            f"{given.name}: 'version' is {version!r}: expected a number, 1 to {NEWEST}"
        )
    try:
        reading = _reading(values, text, given)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{given.name}: not as nccl-tests writes it: {what}") from None
    if version > NEWEST:
        reading.notes.append(f"version {version} is newer than {NEWEST}, which this reader knows")
    return reading


def _reading(values: dict[str, Any], text: str, given: Given) -> Reading:
    config = values["config"]
    reading = Reading("nccl-tests JSON", [])
    devices = config.get("devices") or values.get("devices") or []
    groups: dict[int, int] = {}
    for device in devices:
        groups[device.get("group", 0)] = groups.get(device.get("group", 0), 0) + 1
    ranks = given.ranks or next(iter(groups.values()), 0)
    if not ranks:
        reading.notes.append("no devices: the number of ranks is not known; give --ranks")
    environment = dict(item.partition("=")[::2] for item in values.get("env", []))
    versions = {}
    if values.get("nccl_version"):
        versions["nccl"] = nccl_version(values["nccl_version"])
    common = {
        "ranks": ranks,
        "hosts": len({device["hostname"] for device in devices}),
        "groups": max(1, len(groups)),
        "device": devices[0]["device_info"] if devices else "cuda",
        "warmup": config["warmup_iters"],
        "aggregated": config.get("aggregated_iterations", 1),
        "mode": "graph" if config.get("graph") else "blocking",
        "versions": versions,
        "environment": kept_environment(environment),
        "run": identifier(text),
        "timestamp": _when(values.get("start_time"), given.changed),
    }
    arguments = " ".join(values.get("args", []))
    for result in values.get("results", []):
        program = result.get("experiment_name") or arguments
        found = re.search(r"([a-z_]+)_perf", program)
        name = given.collective or (found[1] if found else "")
        if not name:
            raise UsageError(f"{given.name}: names no collective: expected --collective")
        for part, in_place in (("out_of_place", False), ("in_place", True)):
            if result.get(part) is not None:
                reading.records.append(_record(result, part, in_place, name, common))
    for error in values.get("errors", []):
        if error and error != "null":
            reading.notes.append(f"the tool reported: {error}")
    if "out_of_bounds" in values:
        reading.out_of_bounds.append(int(values["out_of_bounds"]["count"]))
        reading.averages.append(float(values["average_bus_bandwidth"]["bandwidth"]))
    else:
        reading.notes.append("the run did not end: its totals are missing")
    return reading


def _record(
    result: dict[str, Any], part: str, in_place: bool, name: str, common: dict[str, Any]
) -> Measurement:
    half = result[part]
    per_iteration = result.get(f"{part}_per_iter")
    cpu = "cpu_time" in half
    wrong = half["nwrong"]
    return record(
        tool="nccl-tests",
        collective=PROGRAMS.get(name, name),
        dtype=result["type"],
        redop=result["redop"],
        root=int(result["root"]),
        in_place=in_place,
        size=result["size"],
        count=result["count"],
        backend="nccl",
        time_us=float(half["cpu_time" if cpu else "time"]),
        time_is="mean",
        busbw=float(half["bus_bw"]),
        iterations=result.get("actual_iterations", 0),
        clock="cpu-time" if cpu else "cuda-events" if per_iteration else "monotonic",
        spread=_spread(per_iteration, common["ranks"]),
        wrong=None if wrong is None else int(float(wrong)),
        **common,
    )


def _spread(values: dict[str, Any] | None, ranks: int) -> Spread:
    if values is None:
        return Spread()
    skip = values.get("skipped_iterations", 0)
    rows = values.get("per_process_max_times_us") or []
    # A process with several ranks keeps the slowest of them: not a rank's own times.
    each = tuple(statistics.median(row[skip:]) for row in rows) if len(rows) == ranks else ()
    return Spread(
        minimum=float(values["min_us"]),
        mean=float(values["avg_us"]),
        p95=float(values["p95_us"]),
        p99=float(values["p99_us"]),
        maximum=float(values["max_us"]),
        cv=float(values["cv_pct"]) / 100,
        times=tuple(map(float, values["times_us"][skip:])),
        ranks=each,
    )


def _when(text: str | None, otherwise: float) -> float:
    """nccl-tests writes local time without its zone; it is taken as UTC."""
    try:
        moment = datetime.strptime(text or "", "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return otherwise
    return moment.replace(tzinfo=timezone.utc).timestamp()
