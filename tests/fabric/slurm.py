"""A real Slurm: a controller and four slurmd on the hosts of a fabric, and a munged of its own.

Nothing of the machine's own Slurm or munge is used or touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

from fabric import Fabric
from ranks import environment

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
#: A host has two cores to Slurm, whatever the machine has.
NODES = ("gpu01", "gpu02", "gpu03", "gpu04")
CONTROLLER = "control"
START_SECONDS = 60.0

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller}(10.78.0.100)
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmdSpoolDir={directory}/spool.%n
StateSaveLocation={directory}/state
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
NodeName={nodes} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


def why_not() -> str:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if not missing:
        return ""
    return f"needs {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)"


class Step:
    """A srun that is running, and what its tasks have written into `results`."""

    def __init__(self, process, results):
        self.process, self.results = process, results

    def lines(self, key="", value=None):
        """What the tasks have said, in rank order: all, or lines with `key` (and that value)."""
        text = self.results.read_text() if self.results.exists() else ""
        found = [json.loads(line) for line in text.splitlines()]
        if key:
            found = [line for line in found if key in line and value in (None, line[key])]
        return sorted(found, key=lambda line: line["rank"])

    def wait_for(self, count, key, value=None, seconds=40):
        """The lines, as soon as there are `count` of them."""
        deadline = time.monotonic() + seconds
        while len(found := self.lines(key, value)) < count:
            late = time.monotonic() > deadline
            assert self.process.poll() is None and not late, f"{key}={value}: {self.lines()}"
            time.sleep(0.02)
        return found

    def end(self, seconds=60):
        """(exit code, standard output, standard error)."""
        out, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, errors

    def met(self):
        """What each rank said when all had met, once the step has ended well."""
        code, _, errors = self.end()
        assert code == 0, f"{errors}\n{self.lines()}"
        return self.lines("event", "met")


class Slurm:
    """A context manager; commands run on the controller's host, as on a login node."""

    def __init__(self, directory: Path, proctrack: str = "linuxproc"):
        self.directory, self.proctrack = directory, proctrack
        self.fabric = Fabric(f"{proctrack}-")
        # Steps that slurmd had to kill end only after KillWait.
        self.fabric.grace_seconds = 15.0
        self.hosts = {}
        self.daemons = []
        self.environment = {"SLURM_CONF": str(directory / "slurm.conf")}

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self):
        addresses = {name: f"10.78.0.{i}" for i, name in enumerate(NODES, 1)}
        addresses[CONTROLLER] = "10.78.0.100"
        for name, address in addresses.items():
            host = self.fabric.host(name, f"{address}/24")
            host.set_hosts(*(f"{number} {known}" for known, number in addresses.items()))
            self.hosts[name] = host
        text = CONFIGURATION.format(
            controller=CONTROLLER,
            directory=self.directory,
            nodes=",".join(NODES),
            proctrack=self.proctrack,
        )
        (self.directory / "slurm.conf").write_text(text)
        # Unless told, slurmd looks for mounted cgroups, which `ip netns exec` hides, and stops.
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.directory / "state").mkdir()
        for name in NODES:
            (self.directory / f"spool.{name}").mkdir()
        self._start_munge()
        self._daemon(CONTROLLER, "slurmctld")
        for name in NODES:
            self._daemon(name, "slurmd")
        self._wait(self._is_idle, "four idle hosts")

    def _start_munge(self):
        key = self.directory / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(128))
        files = (("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"))
        files += (("key-file", "key"), ("seed-file", "seed"))
        flags = [f"--{flag}={self.directory}/munge.{suffix}" for flag, suffix in files]
        # --force: it may run as root, and below a directory that only root can enter.
        self._popen("munged", ["munged", "--foreground", "--force", *flags])
        self._wait((self.directory / "munge.socket").exists, "munged's socket")

    def _daemon(self, host, program):
        self._popen(f"{program}.{host}", self.hosts[host].command(program, "-D"))

    def _popen(self, name, command):
        with (self.directory / f"{name}.err").open("w") as errors:
            process = self.fabric.popen(
                command,
                env=environment(**self.environment),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=subprocess.STDOUT,
            )
        self.daemons.append(process)

    def _wait(self, condition, what):
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            ended = [p.args for p in self.daemons if p.poll() is not None]
            late = time.monotonic() > deadline
            assert not ended and not late, f"Slurm: no {what}: {ended}\n{self.logs()}"
            time.sleep(0.1)

    def _is_idle(self):
        shown = self.run("sinfo", "--noheader", "--format=%T %D", check=False)
        return shown.split() == ["idle", str(len(NODES))]

    def logs(self):
        files = sorted([*self.directory.glob("*.log"), *self.directory.glob("*.err")])
        parts = [f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in files]
        return "\n".join(parts)

    def command(self, *command):
        return self.hosts[CONTROLLER].command(*command)

    def run(self, *command, check=True, timeout=60, cwd=None, **env):
        """Standard output of a command that ends by itself."""
        done = subprocess.run(
            self.command(*command),
            cwd=cwd,
            env=environment(**self.environment, **env),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def popen(self, *command, **options):
        """A command whose output is read while it runs; `env` is what it gets besides."""
        env = environment(**self.environment, **options.pop("env", {}))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return self.fabric.popen(self.command(*command), env=env, **pipes, **options)

    def agents(self):
        """host -> process ids of agents there, for hosts that have any."""
        found = {n: self.fabric.pids(host, "commkit-agent") for n, host in self.hosts.items()}
        return {name: pids for name, pids in found.items() if pids}

    def end_jobs(self):
        """Cancels what a test has left; returns when every host is idle again."""
        self.run("scancel", "--quiet", "--user=root")
        self._wait(self._is_idle, "end of the jobs")

    def __exit__(self, *_):
        # The last that was started goes first: steps still report to the controller.
        for process in reversed(self.daemons):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
        self.fabric.__exit__()
