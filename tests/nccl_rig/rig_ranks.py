"""run_ranks: one body in every rank of a world, over gloo or, on the rig, over NCCL.

The same test runs with both: `backend()` and `device()` say what a body is to use.  On the rig each
rank comes back with its counters of NCCL calls, and each eight ranks are a host of their own with
a device for each.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent / "loopback")) if path not in sys.path]

import rig  # noqa: E402
import torch  # noqa: E402
import torch_jobs  # noqa: E402

DEVICES = 8
_preloaded = ["torch", "torch.nn.parallel", "commkit.api"]


def preload(*modules: str) -> None:
    """Has them imported once, before ranks are forked; a test module says so as it is imported."""
    _preloaded.extend(modules)
    torch_jobs._context.set_forkserver_preload(_preloaded)


# What a mesh imports when it is first used takes a second a rank.
preload("torch.distributed.tensor")


def backend() -> str:
    return "nccl" if rig.active() else "gloo"


def device() -> torch.device:
    """This rank's device; on the rig it becomes the current one."""
    if not rig.active():
        return torch.device("cpu")
    chosen = torch.device("cuda", int(os.environ["RANK"]) % DEVICES)
    torch.cuda.set_device(chosen)
    return chosen


def calls() -> dict[str, int]:
    """How often this process has made each call of NCCL; empty where there is no rig."""
    if not rig.active():
        return {}
    text = ctypes.create_string_buffer(4096)
    ctypes.CDLL(None).ncclRigCounters(text, len(text))
    counters = json.loads(text.value)
    del counters["pid"]
    return counters


@dataclasses.dataclass(frozen=True)
class Rank:
    """What a rank's body returned or raised, and the calls of NCCL that it made."""

    value: Any = None
    error: str = ""  # the name of the exception's class
    text: str = ""
    trace: str = ""
    exit_code: int = 0
    calls: dict[str, int] = dataclasses.field(default_factory=dict)


def _counted(body: Callable[..., Any], arguments: tuple[Any, ...]) -> Rank:
    try:
        return Rank(value=body(*arguments), calls=calls())
    except BaseException as error:
        text = traceback.format_exc()
        return Rank(error=type(error).__name__, text=str(error), trace=text, calls=calls())


def _variables(rank: int, log_dir: Path | None, env: dict[str, str] | None) -> dict[str, str]:
    if not rig.active():
        return {}
    counters = {"NCCL_RIG_COUNTERS": str(log_dir)} if log_dir else {}
    host = f"host-{rank // DEVICES}"
    # Unless a test asks for it: most say themselves whether a device is bound.
    bind = {} if "COMMKIT_BIND" in (env or {}) else {"COMMKIT_BIND": "off"}
    return {"NCCL_HOSTID": host, "COMMKIT_HOST_ID": host, **bind, **counters}


def run_ranks(
    size: int,
    body: Callable[..., Any] | Path,
    *arguments: Any,
    env: dict[str, str] | None = None,
    timeout: float = 50.0,
    log_dir: Path | None = None,
    check: bool = True,
) -> list[Rank]:
    """What `size` ranks did, in rank order.

    `body` is a function of a module, called with `arguments`, or a script, run with them.  The
    launcher's variables are set as torchrun sets them.  With `check` any error fails the test;
    without it, it is in the Rank.  A rank that is still there after `timeout` seconds fails it.
    """
    with torch_jobs.Job(size, env=env, log_dir=log_dir, deadline=timeout) as job:
        if isinstance(body, Path):
            ranks = _scripts(job, body, arguments, log_dir, env)
        else:
            for rank in range(size):
                job.start(rank, _counted, body, arguments, env=_variables(rank, log_dir, env))
            outcomes = job.outcomes()
            ranks = [_unpacked(outcomes[rank]) for rank in range(size)]
    for rank, result in enumerate(ranks):
        wrong = result.error or result.exit_code
        assert not (check and wrong), (
            f"rank {rank}: {result.error or result.exit_code}: {result.text}\n{result.trace}"
        )
    return ranks


def _unpacked(outcome: torch_jobs.Outcome) -> Rank:
    if isinstance(outcome.value, Rank):
        return outcome.value
    return Rank(error=outcome.error, text=outcome.text, exit_code=outcome.exit_code)


def _scripts(
    job: torch_jobs.Job,
    script: Path,
    arguments: tuple[Any, ...],
    log_dir: Path | None,
    env: dict[str, str] | None,
) -> list[Rank]:
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env={**os.environ, **job.environment(rank), **_variables(rank, log_dir, env)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(job.world)
    ]
    ranks = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=max(1.0, job.deadline - time.monotonic()))
            file = Path(str(log_dir), f"{process.pid}.json")
            counters = json.loads(file.read_text()) if file.exists() else {}
            ranks.append(Rank(value=output, exit_code=process.returncode, calls=counters))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return ranks
