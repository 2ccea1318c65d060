"""What jobs that ended badly leave on a host: agents without ranks, logs, directories of the bench.

Only this user's, in this network namespace, and nothing of a job that lives unless forced.  A
living agent is asked what it serves.  One that does not answer (stopped by a signal, hung) is
judged by what the kernel shows: the processes that it watches through pidfds are its ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from commkit import _C
from commkit.errors import OverlayTimeout
from commkit.overlay import native_errors
from commkit.settings import Settings

PROGRAM = "commkit-agent"
#: An agent whose last rank has gone leaves by itself within about three seconds.
SETTLE_SECONDS = 4.0
#: How old agents and files are, at least, where the caller does not say.
AGENT_AGE = 60.0
FILE_AGE = 7 * 86400.0

_LOG = re.compile(r"agent-[0-9a-f]{16}-[0-9]+\.log")
_BENCH = re.compile(r"commkit-bench-([0-9]+)-\w+")
_LISTENS = "00010000"  # flags of a listening socket in /proc/net/unix

Agent = dict[str, str]


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    state: str  # as in /proc: R, S, D, T (stopped), Z (zombie)
    age: float  # seconds

    @property
    def ended(self) -> bool:
        return self.state in "ZX"


def agents() -> list[Agent]:
    """This user's agents here, by their own word.

    Of one that does not answer there are the name, and where its process is to be seen, pid and
    seconds; its state is `suspended` (by a signal, SIGSTOP for one) or `silent`.
    """
    with native_errors():
        found = [dict(agent) for agent in _C.agents()]
    for agent in found:
        if "pid" in agent:
            continue
        process = _holder(agent["name"])
        if process is None:
            agent["state"] = "silent"
            continue
        agent["pid"], agent["seconds"] = str(process.pid), str(int(process.age))
        agent["state"] = "suspended" if process.state in "Tt" else "silent"
    return found


def clean_agents(
    names: Collection[str] = (),
    *,
    age: float = AGENT_AGE,
    force: bool = False,
    dry_run: bool = False,
    timeout: float = 10.0,
) -> Iterator[str]:
    """Ends agents that serve nobody; yields a line for each that was ended, or left for a reason.

    `names`: only these; none given: all that are at least `age` seconds old, and zombies are told.
    `force` ends agents of living jobs too, of any age.  Raises OverlayTimeout at the end, naming
    those that are still here `timeout` seconds after they were told to end.
    """
    remaining: list[str] = []
    candidates = []
    for agent in agents():
        if names and agent["name"] not in names:
            continue
        why = "" if force else _alive(agent) or _young(agent, age)
        if why:
            yield f"left {agent['name']} ({_who(agent)}: {why})"
        else:
            candidates.append(agent)
    if candidates and not force:
        # One that has just lost its last rank is leaving, or a next attempt of its job is coming.
        candidates = list(_settled(candidates))
    for agent in candidates:
        answers = _answers(agent)
        verb, idle = ("stop", _idle(agent)) if answers else ("kill", agent["state"])
        if not dry_run and not _end(agent, timeout):
            remaining.append(f"{agent['name']} ({_who(agent)})")
            continue
        yield f"{_did(verb, dry_run)} {agent['name']} ({_who(agent)}: {idle})"
    for process in [] if names else _processes(PROGRAM):
        if process.state == "Z":
            yield (
                f"left zombie pid {process.pid}: only its parent, pid {process.parent}, can reap "
                "it; start containers with an init"
            )
    if remaining:
        raise OverlayTimeout(
            f"still here {timeout:g} s after they were told to end: {', '.join(remaining)}; "
            "a process that waits for a device or a file system ends when that answers"
        )


def clean_files(
    settings: Settings, *, age: float = FILE_AGE, dry_run: bool = False
) -> Iterator[str]:
    """Removes logs of ended agents and the bench's directories that are `age` seconds old."""
    for path in _stale_files(settings, age):
        old = _age_text(time.time() - path.lstat().st_mtime)
        if not dry_run:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        yield f"{_did('remove', dry_run)} {path} ({old} old)"


def seconds_of(text: str) -> float:
    """`90`, `90s`, `15m`, `2h` or `7d` in seconds; ValueError for anything else."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if found is None:
        raise ValueError(text)
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def _did(verb: str, dry_run: bool) -> str:
    if dry_run:
        return f"would {verb}"
    return {"stop": "stopped", "kill": "killed", "remove": "removed"}[verb]


def _age_text(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# --- Agents ------------------------------------------------------------------------------------


def _answers(agent: Agent) -> bool:
    return "waiting_ranks" in agent


def _who(agent: Agent) -> str:
    return f"pid {agent['pid']}" if "pid" in agent else "no pid"


def _idle(agent: Agent) -> str:
    return (
        _alive(agent) or f"no ranks, no agents below it, {_age_text(float(agent['seconds']))} old"
    )


def _alive(agent: Agent) -> str:
    """Why the agent's job may be alive, or ''."""
    if _answers(agent):
        if agent.get("living"):
            return f"ranks {agent['living']} of {agent['world_size']} are alive"
        if agent["waiting_ranks"] != "0":
            return f"{agent['waiting_ranks']} ranks wait for the next world"
        if agent.get("children", "0") != "0":
            return f"serves {agent['children']} agents below it"
        return ""
    if "pid" not in agent:
        return "its process belongs to another user or another pid namespace"
    pids = _watched(int(agent["pid"]))
    if pids:
        return f"{agent['state']}, but its ranks live: pid {', '.join(map(str, pids))}"
    return ""


def _young(agent: Agent, age: float) -> str:
    seconds = float(agent["seconds"])
    return f"only {_age_text(seconds)} old" if seconds < age else ""


def _settled(candidates: list[Agent]) -> Iterator[Agent]:
    time.sleep(SETTLE_SECONDS)
    now = {agent["name"]: agent for agent in agents()}
    for agent in candidates:
        later = now.get(agent["name"], {})
        if later.get("pid") == agent.get("pid") and not _alive(later):
            yield later


def _end(agent: Agent, timeout: float) -> bool:
    """Tells an agent to end, or kills one that does not listen; whether it is gone in time."""
    deadline = time.monotonic() + timeout
    if _answers(agent):
        # A failure: it went by itself, or has fallen silent; then it is still here below.
        with contextlib.suppress(_C.Failure):
            _C.stop_agent(agent["name"], timeout)
    elif "pid" not in agent or not _kill(agent):
        return False
    while (process := _holder(agent["name"])) and str(process.pid) == agent["pid"]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _kill(agent: Agent) -> bool:
    # The descriptor names this process and no later one with its pid.
    try:
        descriptor = os.pidfd_open(int(agent["pid"]))
    except ProcessLookupError:
        return True
    try:
        process = _holder(agent["name"])
        if process is not None and str(process.pid) == agent["pid"]:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    finally:
        os.close(descriptor)


def _process(pid: int) -> Process | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        up = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return None
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return Process(pid, int(fields[1]), fields[0], max(0.0, up - started))


def _processes(name: str) -> Iterator[Process]:
    """This user's processes of that name."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            # A process that has not executed its program yet, or a zombie, has a name as well.
            if Path(f"/proc/{entry}/comm").read_text().strip() != name:
                continue
            mine = os.stat(f"/proc/{entry}").st_uid == os.getuid()
        except OSError:
            continue
        if mine and (process := _process(int(entry))):
            yield process


def _holder(name: str) -> Process | None:
    """The agent's process that listens on the abstract socket `name`."""
    socket = None
    for line in Path("/proc/net/unix").read_text().splitlines():
        fields = line.split()
        if len(fields) == 8 and fields[3] == _LISTENS and fields[7] == f"@{name}":
            socket = f"socket:[{fields[6]}]"
    if socket is None:
        return None
    for process in _processes(PROGRAM):
        directory = f"/proc/{process.pid}/fd"
        try:
            if any(os.readlink(f"{directory}/{fd}") == socket for fd in os.listdir(directory)):
                return process
        except OSError:
            continue
    return None


def _watched(agent: int) -> list[int]:
    """Living processes that the agent holds a pidfd of: its ranks."""
    pids = set()
    try:
        entries = os.listdir(f"/proc/{agent}/fdinfo")
    except OSError:
        return []
    for entry in entries:
        try:
            text = Path(f"/proc/{agent}/fdinfo/{entry}").read_text()
        except OSError:
            continue
        # -1 where the process is gone, 0 where it is not of this pid namespace.
        found = re.search(r"^Pid:\s*(-?\d+)$", text, re.MULTILINE)
        if found and int(found[1]) >= 0:
            process = _process(int(found[1]))
            if int(found[1]) == 0 or (process is not None and not process.ended):
                pids.add(int(found[1]))
    return sorted(pids)


# --- Files -------------------------------------------------------------------------------------


def _mine(path: Path, age: float) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    return info.st_uid == os.getuid() and time.time() - info.st_mtime >= age


def _in_use(path: Path) -> bool:
    """An agent holds a lock on its log for as long as it lives."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _stale_files(settings: Settings, age: float) -> Iterator[Path]:
    logs = Path(settings.log_dir)
    if logs.is_dir() and not logs.is_symlink():
        for path in sorted(logs.iterdir()):
            regular = path.is_file() and not path.is_symlink()
            if _LOG.fullmatch(path.name) and regular and _mine(path, age) and not _in_use(path):
                yield path
    for path in sorted(Path(tempfile.gettempdir()).iterdir()):
        found = _BENCH.fullmatch(path.name)
        if found and path.is_dir() and not path.is_symlink() and _mine(path, age):
            process = _process(int(found[1]))
            if process is None or process.ended:
                yield path
