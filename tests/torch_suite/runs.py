"""Runs of suite.py as data, and stock torch's results as tests/recorded/torch_suite holds them.

python tests/torch_suite/runs.py        records the installed torch: make torch-suite-record
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "recorded" / "torch_suite"

#: torch runs its file with 4 ranks.  Tests on groups of some of the ranks want 8.
WORLD, LARGER_WORLD = 4, 8
WANTS_MORE = "Skipped due to small world size."

#: Seconds for one run of suite.py, a shared machine that stands still now and then included.
DEADLINE = 900


@dataclass
class Run:
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)  # torch's default ones
    subgroups: list[dict[str, Any]] = field(default_factory=list)  # all others
    log: str = ""

    def summary(self, name: str) -> dict[str, Any]:
        """What is compared: the outcome, each rank's exit code, and default groups of all ranks."""
        test = self.tests.get(name)
        if test is None:
            return {"outcome": "did not run"}
        groups = sum(group["group"] == name for group in self.groups)
        return {"outcome": test["outcome"], "exits": test["exits"], "groups": groups}


def run(
    world_size: int,
    names: list[str],
    scratch: Path,
    *,
    commkit: bool,
    env: dict[str, str] | None = None,
) -> Run:
    """All tests, or those in `names`; a run that does not end in time is what it was until then."""
    out = scratch / f"suite-{world_size}-{len(names)}-{commkit}.jsonl"
    out.write_text("")
    log = out.with_suffix(".log")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, *(["-m", "commkit", "run"] if commkit else [])]
    command += [str(Path(__file__).with_name("suite.py")), str(out), str(world_size), *names]
    with log.open("w") as stream:
        child = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
        )
        try:
            child.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            child.kill()
            child.wait()
    result = Run(log=log.read_text(errors="replace"))
    for line in map(json.loads, out.read_text().splitlines()):
        if "test" in line:
            result.tests[line.pop("test")] = line
        else:
            (result.subgroups if "subgroup" in line else result.groups).append(line)
    return result


def version() -> str:
    """The installed torch's, without the build's name."""
    return importlib.metadata.version("torch").partition("+")[0]


def record_file() -> Path:
    return RECORDED / f"{version()}.json"


def record(scratch: Path) -> None:
    """Runs stock torch and writes its results."""
    results = {}
    small = run(WORLD, [], scratch, commkit=False)
    larger = [name for name, test in small.tests.items() if test["reason"] == WANTS_MORE]
    large = run(LARGER_WORLD, larger, scratch, commkit=False) if larger else Run()
    for size, done in ((WORLD, small), (LARGER_WORLD, large)):
        entries = []
        for name in sorted(done.tests):
            entry = done.summary(name)
            # The last line of a traceback; the others hold paths of one machine.
            if reason := done.tests[name]["reason"].strip():
                entry["reason"] = reason.splitlines()[-1]
            entries.append(f"{json.dumps(name)}: {json.dumps(entry)}")
        results[size] = ",\n".join(entries)
    if not small.tests:
        sys.exit(f"no test ran:\n{small.log}")
    build = json.dumps(importlib.metadata.version("torch"))
    worlds = ",\n\n".join(f'"{size}": {{\n{text}\n}}' for size, text in results.items())
    RECORDED.mkdir(parents=True, exist_ok=True)
    record_file().write_text(f'{{"torch": {build},\n\n{worlds}\n}}\n')
    outcomes = [test["outcome"] for done in (small, large) for test in done.tests.values()]
    counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in sorted(set(outcomes)))
    print(f"{record_file()}: {counts}")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        record(Path(name))
