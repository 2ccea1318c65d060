"""Network namespaces by name: made and removed together, entered by a thread, swept after a kill.

A name is commkit-lab-<pid>-<start>-<number>-<node>: pid and start time (in clock ticks since boot,
/proc/PID/stat) of the process that made it.  Both together tell a dead owner from a later process
with the same pid.  Needs root; only `thread_inside` works without the `ip` command.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from commkit.errors import LaunchError

RUN = Path("/run/netns")
#: `ip netns exec` mounts what lies here over /etc of the process that it starts.
ETC = Path("/etc/netns")
#: How long killed processes may take to be gone.
GONE_SECONDS = 5.0
#: How long a device may take to be usable after it has come up.
READY_SECONDS = 10.0
#: A shaped port holds what it sends in this long, and takes at least so many bytes at once.
LATENCY, BURST = "40ms", 12_000

_NAME = re.compile(r"commkit-lab-(\d+)-(\d+)-\d+-.+")
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


def why_not() -> str:
    """Why namespaces cannot be made here; '' if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"the command {command} is missing (Debian: iproute2)"
    name = new_prefix() + "try"
    done = _call(["ip", "netns", "add", name])
    if done.returncode:
        return f"ip netns add: {' '.join(done.stderr.split())}"
    try:
        with thread_inside(name):
            if not Path("/proc/sys/net/ipv4/fib_multipath_hash_seed").exists():
                return "this kernel has no net.ipv4.fib_multipath_hash_seed (Linux 6.11 has)"
    finally:
        remove([name])
    return ""


def new_prefix() -> str:
    """Of names of this process that nothing else has."""
    return f"commkit-lab-{os.getpid()}-{_start_time(os.getpid())}-{next(_numbers)}-"


def _start_time(pid: int) -> int | None:
    """None: there is no such process, or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def names(prefix: str) -> list[str]:
    """Namespaces, and leftovers of them in /etc/netns, whose names begin so."""
    found = {entry.name for where in (RUN, ETC) if where.is_dir() for entry in where.iterdir()}
    return sorted(name for name in found if name.startswith(prefix))


def sweep() -> list[str]:
    """Remove the namespaces of dead owners, and what still runs in them; their names."""
    dead = [
        name
        for name in names("commkit-lab-")
        if (owner := _NAME.fullmatch(name)) and _start_time(int(owner[1])) != int(owner[2])
    ]
    remove(dead)
    return dead


def remove(some: Iterable[str]) -> None:
    """End every process in these namespaces and delete them.

    Raises LaunchError if a process outlives SIGKILL (it then keeps its namespace).
    """
    some = list(some)
    if not some:
        return
    left = end_processes(some)
    lines = "".join(f"netns delete {name}\n" for name in some if (RUN / name).exists())
    done = _call(["ip", "-force", "-batch", "-"], lines)
    for name in some:
        shutil.rmtree(ETC / name, ignore_errors=True)
    if left:
        raise LaunchError(
            f"processes {', '.join(map(str, left))} do not end by SIGKILL within "
            f"{GONE_SECONDS:g} s: their network namespaces stay"
        )
    if remaining := [name for name in some if (RUN / name).exists()]:
        raise LaunchError(f"ip netns delete {remaining[0]}: {' '.join(done.stderr.split())}")


def _identity(path: Path | str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _wanted(some: Iterable[str]) -> set[tuple[int, int] | None]:
    """Never the namespace of this process: whoever signals its processes would end itself."""
    return {_identity(RUN / name) for name in some} - {None, _identity("/proc/self/ns/net")}


def _pids(wanted: set[tuple[int, int] | None]) -> list[int]:
    return [
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdigit() and _identity(f"/proc/{entry}/ns/net") in wanted
    ]


def pids(some: Iterable[str]) -> list[int]:
    """Processes in these namespaces."""
    return _pids(_wanted(some))


def signal_processes(some: Iterable[str], number: int) -> list[int]:
    """Send a signal to every process in these namespaces; those that got it."""
    wanted = _wanted(some)
    told = []
    for pid in _pids(wanted):
        # By descriptor: the pid may be someone else's by the time it is looked at again.
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                if _identity(f"/proc/{pid}/ns/net") in wanted:
                    signal.pidfd_send_signal(fd, number)
                    told.append(pid)
            finally:
                os.close(fd)
    return told


def end_processes(some: Iterable[str]) -> list[int]:
    """SIGKILL; those that are still there after GONE_SECONDS."""
    some = list(some)
    deadline = time.monotonic() + GONE_SECONDS
    while signal_processes(some, signal.SIGKILL):
        if time.monotonic() > deadline:
            return pids(some)
        time.sleep(0.01)
    return []


@contextlib.contextmanager
def thread_inside(name: str) -> Iterator[None]:
    """The body runs with this *thread* in the namespace.

    Sockets stay where they are made, so one process can have ends on every host.  /proc/sys/net and
    /proc/thread-self/net are those of the namespace, too.
    """
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(name)
        try:
            yield
        finally:
            _setns(here)
    finally:
        os.close(here)


def enter(name: str) -> None:
    """The calling thread, and those that it starts from now on, for good: for a forked child."""
    fd = os.open(RUN / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _setns(fd)
    finally:
        os.close(fd)


def _setns(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def batch(tool: str, lines: Iterable[str], name: str | None = None, *, force: bool = False) -> str:
    """Lines for `ip -batch` or `tc -batch`, inside a namespace or none; the standard output.

    Raises LaunchError with the tool's words and the line; with `force` what fails is passed over.
    """
    lines = list(lines)
    if not lines:
        return ""
    where = [] if name is None else ["-n", name]
    options = [*where, *(["-force"] if force else []), "-batch", "-"]
    done = _call([tool, *options], "\n".join(lines) + "\n")
    if done.returncode and not force:
        match = re.search(r"Command failed -:(\d+)", done.stderr)
        line = f" {lines[int(match[1]) - 1]}" if match else ""
        raise LaunchError(f"{' '.join([tool, *where])}{line}: {' '.join(done.stderr.split())}")
    return done.stdout


def wait_for_ipv6(name: str, devices: Iterable[str]) -> None:
    """Until devices that have just come up can look for neighbours: up to a second.

    Raises LaunchError after READY_SECONDS.
    """
    waiting = set(devices)
    deadline = time.monotonic() + READY_SECONDS
    while True:
        with thread_inside(name):
            lines = Path("/proc/thread-self/net/ipv6_route").read_text().splitlines()
        # Destination, its prefix length, ..., device.
        near = [line.split() for line in lines if line.startswith("fe80" + "0" * 28 + " 40 ")]
        waiting -= {fields[-1] for fields in near}
        if not waiting:
            return
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{name}: no IPv6 on {', '.join(sorted(waiting))} after {READY_SECONDS:g} s; is it "
                "switched off in this kernel?"
            )
        time.sleep(0.01)


def shaper(mbit: float) -> str:
    """tc's words for a port of this rate."""
    # A bucket of less than what arrives between two ticks of the clock would hold the rate down.
    burst = max(BURST, round(mbit * 1e6 / 8 / 250))
    return f"tbf rate {round(mbit * 1e6)}bit burst {burst} latency {LATENCY}"


def call(name: str, *command: str, stdin: str = "") -> str:
    """Run a command inside a namespace; LaunchError if it fails."""
    done = _call(["ip", "netns", "exec", name, *command], stdin)
    if done.returncode:
        raise LaunchError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout


def _call(command: list[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=stdin, capture_output=True, text=True)
    except OSError as error:
        raise LaunchError(f"{command[0]}: {error.strerror}") from None
