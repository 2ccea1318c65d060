"""torch's own DistributedTest on gloo: forked ranks, one world a test, as torch's CI runs it.

    python tests/torch_suite/suite.py OUT WORLD_SIZE [TEST...]                   on stock torch
    python -m commkit run tests/torch_suite/suite.py OUT WORLD_SIZE [TEST...]    the same script

The tests come with the installed torch (torch.testing._internal.distributed).  The files that start
them exist in torch's repository alone; this script takes their place: the variables, and one fork
a rank.  It knows nothing of commkit but how to tell who made a group.  OUT gets a JSON object a
line: one for each test, and one for each group that a rank has made.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

#: Seconds after which torch ends a test; its own 300 is for slower machines and more ranks.
TEST_TIMEOUT = 60


def prepare(scratch: Path, world_size: int) -> None:
    """Sets what torch's modules read when they are imported."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(world_size),
        # Of the test that starts a second world: skipped with env://.  The first one of each test
        # uses a file of its own, whatever this says.
        INIT_METHOD=f"file://{scratch}/second-world",
        TEMP_DIR=str(scratch),
        TMPDIR=str(scratch),
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TEST_TIMEOUT),
        CUDA_VISIBLE_DEVICES="",  # the outcome shall not depend on the machine
        OMP_NUM_THREADS="1",
        KINETO_LOG_LEVEL="99",
    )
    tempfile.tempdir = str(scratch)


def note(out: Path, **entry: Any) -> None:
    """Appends a line; one write, so that lines of several ranks stay whole."""
    with out.open("a") as stream:
        stream.write(json.dumps(entry) + "\n")


def forked(out: Path) -> Any:
    """torch's test class, with forked ranks."""
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    from torch.testing._internal.distributed import distributed_test

    setter: Any = c10d._update_default_pg

    def observed(group: Any) -> None:
        # Whatever name a test called: each default group passes here.
        setter(group)
        if group is not None:
            kind, by_commkit = maker(c10d._world.pg_map[group][1])
            name, rank = Forked.current, group.rank()
            note(out, group=name, rank=rank, size=group.size(), store=kind, commkit=by_commkit)

    c10d._update_default_pg = observed
    register: Any = c10d._register_process_group

    def registered(name: Any, group: Any) -> None:
        register(name, group)
        if dist.is_initialized():
            note(out, subgroup=Forked.current, rank=dist.get_rank(), name=name)

    c10d._register_process_group = registered

    class Forked(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        current = ""
        exits: list[int | None] | None = None

        def setUp(self) -> None:
            super().setUp()
            Forked.current = self._testMethodName
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _check_return_codes(self, *arguments: Any) -> None:
            # torch itself looks at the code of rank 0 and for one code of failure.
            Forked.exits = [process.exitcode for process in self.processes]
            super()._check_return_codes(*arguments)

    return Forked


def maker(store: Any) -> tuple[str, bool]:
    """The type of a default group's store, and whether it is commkit's.

    Told by the store that torch uses, not by the function that was called: a client of the port of
    the agent that this process has joined.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    api = sys.modules.get("commkit.api")
    world = api.world() if api is not None else None
    if world is None:
        return type(store).__name__, False
    ours = type(store).__module__ == "commkit.store" or (
        getattr(store, "port", None) == world.identity.store_port
    )
    return type(store).__name__, ours


class Outcomes(unittest.TestResult):
    """Writes each test's outcome when it is known."""

    def __init__(self, out: Path, case: Any) -> None:
        super().__init__()
        self._out, self._case = out, case
        self._began = 0.0

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self._case.exits = None
        self._began = time.monotonic()

    def _note(self, test: Any, outcome: str, reason: str = "") -> None:
        entry = {"test": test._testMethodName, "outcome": outcome, "reason": reason}
        seconds = round(time.monotonic() - self._began, 2)
        note(self._out, **entry, exits=self._case.exits, seconds=seconds)
        print(f"{entry['test']}: {outcome} in {seconds} s  {reason}", flush=True)

    def addSuccess(self, test: Any) -> None:
        self._note(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        self._note(test, "skipped", reason)

    def addFailure(self, test: Any, err: Any) -> None:
        self._note(test, "failed", self._exc_info_to_string(err, test))

    addError = addFailure


def main(out: Path, world_size: int, names: list[str]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix="torch-suite-"))
    try:
        prepare(scratch, world_size)
        del sys.argv[1:]  # torch's utilities for tests read it
        case = forked(out)
        outcomes = Outcomes(out, case)
        for name in names or unittest.TestLoader().getTestCaseNames(case):
            case(name)(outcomes)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
