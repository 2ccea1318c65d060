"""Every COMMKIT_* variable: its meaning, what it accepts, its default.

Nothing else in commkit reads the environment, except launch.py (the launchers' variables).
A wrong value is a LaunchError that names the variable, the value and what was expected.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from commkit.errors import LaunchError

#: name -> (accepted values, default, meaning); `commkit env --settings` prints it.
VARIABLES: dict[str, tuple[str, str, str]] = {
    "COMMKIT_DISABLE": ("0 or 1", "0", "1 turns commkit off: the same script runs on stock torch"),
    "COMMKIT_DEBUG": ("0 or 1", "0", "1 shows the traceback of an error"),
    "COMMKIT_LAUNCHER": (
        "torchrun, slurm, openmpi, mpich, pmix, kubernetes, none",
        "unset",
        "read this launcher's variables and no other's",
    ),
    "COMMKIT_JOB_ID": (
        "1 to 128 printable characters",
        "unset",
        "separates two jobs that share a root endpoint; the same on every rank",
    ),
    "COMMKIT_HOST_ID": (
        "1 to 64 printable characters",
        "unset",
        "replaces (boot id, network namespace) as this process's host identity",
    ),
    "COMMKIT_IFNAME": (
        "NCCL's syntax: prefixes; =exact; ^excluded; ^=excluded exactly",
        "unset",
        "interfaces whose addresses agents may use",
    ),
    "COMMKIT_PORT": ("1-65535", "unset", "the root agent's port"),
    "COMMKIT_PORT_RANGE": ("LOW-HIGH", "unset", "ports that other agents may listen on"),
    "COMMKIT_ONE_PORT": (
        "1-65535",
        "unset",
        "the port of every agent, the root's too, for firewalls; one job at a time on a host",
    ),
    "COMMKIT_SECRET": (
        "8 to 1024 characters",
        "unset",
        "agents prove to one another that they know it; the same on every host",
    ),
    "COMMKIT_STORE": (
        "auto, wire or python",
        "auto",
        "how torch reaches the agent's store: its own client, or a Python Store",
    ),
    "COMMKIT_GROUPS": (
        "members or split",
        "members",
        "how NCCL's groups are made where the device is bound: by their members from fresh ids, or "
        "split off the whole world's communicator, once for all groups of a family",
    ),
    "COMMKIT_BIND": (
        "auto or off",
        "auto",
        "whether commkit.init_process_group binds a GPU over NCCL where no device_id is given: the "
        "current one if one was chosen, else that of the local rank; commkit run does not",
    ),
    "COMMKIT_LOG_DIR": (
        "a directory",
        "unset",
        "where agents write their logs; unset: $XDG_RUNTIME_DIR/commkit, else commkit-<uid> in "
        "the system's temporary directory; an agent removes agents' logs older than a week there",
    ),
    "COMMKIT_REPORT": (
        "the path of a file",
        "unset",
        "where rank 0 writes, when the world ends, what each phase of the start-up took; the same "
        "on every rank",
    ),
    "COMMKIT_TOPOLOGY": (
        "the path of a file",
        "unset",
        "which host gets which ranks: what commkit place --emit perm has written, or, where "
        "layout= is passed, a description of the fabric; the same on every rank",
    ),
    "COMMKIT_HOST_NAME": (
        "1 to 253 letters, digits, '.', '-' and '_'",
        "unset",
        "this host's name in files that describe the fabric; unset: SLURMD_NODENAME and the "
        "hostname, with or without a domain",
    ),
    "COMMKIT_PLACED": (
        "RANK:RANK:PORT",
        "unset",
        "set by commkit run where it has rewritten RANK: the launcher's, the new one, MASTER_PORT",
    ),
    "COMMKIT_TUNER_TABLE": (
        "the path of a file",
        "unset",
        "what commkit's plugin chooses for NCCL (commkit tune); the same on every rank",
    ),
    "COMMKIT_TREE_DEGREE": (
        "1-4096",
        "unset",
        "children of an agent; unset: about the square root of the number of hosts, 8 to 32",
    ),
    "COMMKIT_HEARTBEAT": (
        "0.5-600 seconds",
        "10",
        "a silent host is declared lost after this long",
    ),
}

#: What a value must match in full.  Compiled on import: a start-up is too short to do it in.
_PATTERNS: dict[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "COMMKIT_DISABLE": "[01]",
        "COMMKIT_DEBUG": "[01]",
        "COMMKIT_LAUNCHER": "torchrun|slurm|openmpi|mpich|pmix|kubernetes|none",
        "COMMKIT_JOB_ID": r"[\x21-\x7e]{1,128}",
        "COMMKIT_HOST_ID": r"[\x21-\x7e]{1,64}",
        "COMMKIT_IFNAME": r"(\^=|\^|=)?[^,\s^=]+(,[^,\s^=]+)*",
        "COMMKIT_PORT": r"\d{1,5}",
        "COMMKIT_ONE_PORT": r"\d{1,5}",
        "COMMKIT_PORT_RANGE": r"\d{1,5}-\d{1,5}",
        "COMMKIT_SECRET": r"(?s).{8,1024}",
        "COMMKIT_STORE": "auto|wire|python",
        "COMMKIT_GROUPS": "members|split",
        "COMMKIT_BIND": "auto|off",
        "COMMKIT_LOG_DIR": r"[^\0]+",
        "COMMKIT_REPORT": r"[^\0]+",
        "COMMKIT_TOPOLOGY": r"[^\0]+",
        "COMMKIT_HOST_NAME": r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}",
        "COMMKIT_PLACED": r"\d{1,9}:\d{1,9}:[^:]*",
        "COMMKIT_TUNER_TABLE": r"[^\0]+",
        "COMMKIT_TREE_DEGREE": r"\d{1,4}",
        "COMMKIT_HEARTBEAT": r"\d+(\.\d+)?",
    }.items()
}


@dataclass(frozen=True, slots=True)
class Settings:
    disable: bool = False
    debug: bool = False
    launcher: str = ""
    job_id: str = ""
    host_id: str = ""
    ifname: str = ""
    port: int = 0
    port_range: tuple[int, int] = (0, 0)
    one_port: int = 0
    secret: str = ""
    store: str = "auto"
    groups: str = "members"
    bind: str = "auto"
    log_dir: str = ""
    report: str = ""
    topology: str = ""
    host_name: str = ""
    placed: str = ""
    tuner_table: str = ""
    tree_degree: int = 0
    heartbeat: float = 10.0

    @property
    def root_port(self) -> int:
        """The root agent's port, 0: any."""
        return self.one_port or self.port

    @property
    def agent_ports(self) -> tuple[int, int]:
        """Lowest and highest port of the other agents, (0, 0): any."""
        return (self.one_port, self.one_port) if self.one_port else self.port_range


def _default_log_dir(env: Mapping[str, str]) -> str:
    runtime = env.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isdir(runtime):
        return os.path.join(runtime, "commkit")
    # As tempfile has it, without the file that it writes there to see whether it can.
    named = (env.get(name, "") for name in ("TMPDIR", "TEMP", "TMP"))
    place = next((path for path in named if path and os.path.isdir(path)), "/tmp")
    return os.path.join(place, f"commkit-{os.getuid()}")


def _bad(name: str, value: str) -> LaunchError:
    return LaunchError(f"{name}={value!r}: expected {VARIABLES[name][0]}; correct or unset it")


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the COMMKIT_* variables.  An empty value counts as unset."""
    env = os.environ if environ is None else environ

    def text(name: str) -> str:
        value = env.get(name, "")
        if value and not _PATTERNS[name].fullmatch(value):
            raise _bad(name, "***" if name == "COMMKIT_SECRET" else value)
        return value

    def flag(name: str) -> bool:
        return text(name) == "1"

    def number(name: str) -> int:
        value = text(name)
        if value and not 1 <= int(value) <= 65535:
            raise _bad(name, value)
        return int(value or 0)

    port, one_port = number("COMMKIT_PORT"), number("COMMKIT_ONE_PORT")
    bounds = text("COMMKIT_PORT_RANGE")
    low, high = (int(part) for part in bounds.split("-")) if bounds else (0, 0)
    if bounds and not 1 <= low <= high <= 65535:
        raise _bad("COMMKIT_PORT_RANGE", bounds)
    if one_port:
        for name in ("COMMKIT_PORT", "COMMKIT_PORT_RANGE"):
            if env.get(name):
                raise LaunchError(
                    f"COMMKIT_ONE_PORT={one_port} and {name}={env[name]} are both set; unset one: "
                    "COMMKIT_ONE_PORT is the port of every agent"
                )
    beat = text("COMMKIT_HEARTBEAT")
    if beat and not 0.5 <= float(beat) <= 600:
        raise _bad("COMMKIT_HEARTBEAT", beat)
    degree = text("COMMKIT_TREE_DEGREE")
    if degree and not 1 <= int(degree) <= 4096:
        raise _bad("COMMKIT_TREE_DEGREE", degree)
    return Settings(
        disable=flag("COMMKIT_DISABLE"),
        debug=flag("COMMKIT_DEBUG"),
        launcher=text("COMMKIT_LAUNCHER"),
        job_id=text("COMMKIT_JOB_ID"),
        host_id=text("COMMKIT_HOST_ID"),
        ifname=text("COMMKIT_IFNAME"),
        port=port,
        port_range=(low, high),
        one_port=one_port,
        secret=text("COMMKIT_SECRET"),
        store=text("COMMKIT_STORE") or "auto",
        groups=text("COMMKIT_GROUPS") or "members",
        bind=text("COMMKIT_BIND") or "auto",
        # Agents work in the root directory, so it must not depend on this process's.
        log_dir=os.path.abspath(text("COMMKIT_LOG_DIR") or _default_log_dir(env)),
        # Written at the end, when the directory may be another.
        report=os.path.abspath(path) if (path := text("COMMKIT_REPORT")) else "",
        topology=os.path.abspath(path) if (path := text("COMMKIT_TOPOLOGY")) else "",
        host_name=text("COMMKIT_HOST_NAME"),
        placed=text("COMMKIT_PLACED"),
        tuner_table=text("COMMKIT_TUNER_TABLE"),
        heartbeat=float(beat or 10.0),
        tree_degree=int(degree or 0),
    )
