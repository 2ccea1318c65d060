"""One function a launcher: its variables -> Found, or None if it did not start this process.

A launcher counts only when its variables are complete; what is half there is either some other
tool's leftover (another launcher is complete: it wins and the stray is reported) or a mistake
(nobody is complete: LaunchError).  The size of the world is never assumed to be one because it is
missing: N processes would form N worlds that all succeed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from commkit import pods
from commkit.errors import LaunchError, UsageError
from commkit.found import Found, Variables
from commkit.topology import hostlist

#: Slurm's count of tasks on every host, when it is one.
_ONE_A_HOST = re.compile(r"1(\(x[0-9]+\))?")

#: Step ids of slurm.h that are no step of srun: pending, extern, batch, interactive.
_NO_STEPS = {str(0xFFFFFFFD), str(0xFFFFFFFC), str(0xFFFFFFFB), str(0xFFFFFFFA)}
_NO_STEPS |= {"batch", "extern", "interactive"}


def torchrun(v: Variables) -> Found | None:
    """RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: torchrun, or whoever writes torch's variables."""
    if not v.has("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        return None
    return _torch_variables(v, "torchrun")


def _torch_variables(v: Variables, launcher: str) -> Found:
    found = Found(launcher)
    # Kubeflow's operators write these too; then RANK may number pods, which only torchrun splits.
    in_pod = not v.has("LOCAL_RANK") and (v.has("PET_NODE_RANK") or v.has("JOB_COMPLETION_INDEX"))
    if in_pod:
        found.launcher = "kubernetes"
        pods.one_process_a_pod(v, found)
    found.rank = found.need(v, "rank", "RANK")
    found.world_size = found.need(v, "world_size", "WORLD_SIZE")
    found.local_rank = found.read(v, "local_rank", "LOCAL_RANK")
    found.local_world_size = found.read(v, "local_world_size", "LOCAL_WORLD_SIZE")
    groups = v.text("GROUP_WORLD_SIZE")[1]
    if groups.isdigit():
        found.several_hosts = int(groups) > 1
    name, run = v.text("TORCHELASTIC_RUN_ID")
    if run == "none":
        # What torchrun says when no --rdzv-id was given: the port tells two such jobs apart.
        run = f"none:{v.peek('MASTER_PORT')}"
    found.job_id = run
    if name:
        found.origins["job_id"] = f"{name}={run}"
    elif in_pod:
        pods.name_job(v, found)
    return found


def slurm(v: Variables) -> Found | None:
    """A step of srun: SLURM_STEP_ID and SLURM_PROCID, not the job's name, decide.

    A batch script has SLURM_PROCID but no step; salloc's shell has neither.
    """
    if not v.has("SLURM_PROCID") or not (v.has("SLURM_STEP_ID") or v.has("SLURM_STEP_NUM_TASKS")):
        return None
    if v.peek("SLURM_STEP_ID") in _NO_STEPS:
        return None
    found = Found("slurm")
    found.rank = found.need(v, "rank", "SLURM_PROCID")
    found.world_size = found.need(v, "world_size", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    found.local_rank = found.read(v, "local_rank", "SLURM_LOCALID")
    list_name, list_text = v.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    counts_name, counts_text = v.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    node = Found("slurm").read(v, "node", "SLURM_NODEID")
    me = v.text("SLURMD_NODENAME")[1]
    try:
        nodes = hostlist.expand(list_text) if list_text else []
        counts = hostlist.expand_counts(counts_text) if counts_text else []
    except UsageError as error:
        name = list_name if list_text and "host list" in str(error) else counts_name
        raise LaunchError(f"{name}: {error}; unset it or set MASTER_ADDR, MASTER_PORT, RANK, "
                          "WORLD_SIZE") from error  # fmt: skip
    if counts and sum(counts) != found.world_size:
        raise LaunchError(
            f"{counts_name}={counts_text!r} makes {sum(counts)} tasks, but "
            f"{found.origins['world_size']}; correct them, or set RANK, WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT (heterogeneous steps need that)"
        )
    if counts and nodes and len(counts) != len(nodes):
        raise LaunchError(
            f"{counts_name}={counts_text!r} is for {len(counts)} hosts, but {list_name}="
            f"{list_text!r} has {len(nodes)}; correct or unset the wrong one"
        )
    if me in nodes:
        # The name decides: it is what the others will connect to.
        if node is not None and node < len(nodes) and nodes[node] != me:
            found.doubts.append(
                f"SLURMD_NODENAME={me} is not host {node} of {list_name}={list_text}, "
                f"though SLURM_NODEID={node}: the name is believed"
            )
        node = nodes.index(me)
    if counts and (node is not None and node < len(counts)):
        found.local_world_size = counts[node]
    elif counts and len(set(counts)) == 1:
        found.local_world_size = counts[0]
    if found.local_world_size is not None:
        found.origins["local_world_size"] = f"{counts_name}={counts_text}"
    found.nodes = tuple(nodes)
    found.on_first_node = None if node is None else node == 0
    found.several_hosts = len(nodes) > 1 if nodes else None
    if nodes:
        found.origins["root"] = f"{list_name}={list_text}"
    _slurm_job(v, found)
    _slurm_terminal(v, found)
    return found


def _slurm_job(v: Variables, found: Found) -> None:
    name, job = v.text("SLURM_JOB_ID", "SLURM_JOBID")
    if not job:
        return
    step = v.text("SLURM_STEP_ID", "SLURM_STEPID")[1] or "?"
    again = v.text("SLURM_RESTART_COUNT")[1]  # a requeued job keeps its id and numbers steps anew
    found.job_id = f"{job}.{step}" + (f".r{again}" if again else "")
    found.origins["job_id"] = f"{name}={job}, SLURM_STEP_ID={step}"
    found.port_key = f"{found.job_id}.{v.text('SLURM_JOB_UID')[1] or os.getuid()}"


def _slurm_terminal(v: Variables, found: Found) -> None:
    if not v.has("SLURM_PTY_PORT"):
        return
    if found.world_size > 1 and v.peek("COMMKIT_LAUNCHER") != "slurm":
        raise LaunchError(
            f"SLURM_PTY_PORT is set and {found.origins['world_size']}: this step is a terminal, "
            "whose other tasks will not run this program; start it by a srun of its own, or set "
            "COMMKIT_LAUNCHER=none (a world of one) or COMMKIT_LAUNCHER=slurm (all tasks do run it)"
        )
    found.doubts.append("SLURM_PTY_PORT is set: this is srun's terminal, taken as a world of one")


def carries_daemons(v: Variables) -> bool:
    """Does this Slurm step hold mpirun's daemons (one a host) rather than ranks?

    mpiexec inside an allocation starts its proxies by srun; the ranks below inherit the proxy's
    SLURM_PROCID.  Open MPI's own host has no step at all, so the counts prove nothing: what
    counts is that Slurm never sets these variables itself.
    """
    ranks = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "MPI_LOCALNRANKS")
    if not any(v.has(*names) for names in ranks):
        return False
    tasks = v.peek("SLURM_STEP_TASKS_PER_NODE") or v.peek("SLURM_TASKS_PER_NODE")
    return _ONE_A_HOST.fullmatch(tasks) is not None


def openmpi(v: Variables) -> Found | None:
    if not v.has("OMPI_COMM_WORLD_RANK") and not v.has("OMPI_COMM_WORLD_SIZE"):
        return None
    found = Found("openmpi")
    found.rank = found.need(v, "rank", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
    found.world_size = found.need(v, "world_size", "OMPI_COMM_WORLD_SIZE")
    found.local_rank = found.read(v, "local_rank", "OMPI_COMM_WORLD_LOCAL_RANK")
    found.local_world_size = found.read(v, "local_world_size", "OMPI_COMM_WORLD_LOCAL_SIZE")
    # Open MPI 5: host and process id of mpirun; Open MPI 4: a number made of the same.
    name, found.job_id = v.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    v.text("PMIX_RANK")
    return _mpi(v, found, name)


def mpich(v: Variables) -> Found | None:
    """MPICH's Hydra, Intel MPI, Cray PALS (PMI_*) and MVAPICH (MV2_*, MVP_*)."""
    for prefix in ("MV2_COMM_WORLD", "MVP_COMM_WORLD"):
        if v.has(f"{prefix}_RANK") or v.has(f"{prefix}_SIZE"):
            found = Found("mpich")
            found.rank = found.need(v, "rank", f"{prefix}_RANK")
            found.world_size = found.need(v, "world_size", f"{prefix}_SIZE")
            found.local_rank = found.read(v, "local_rank", f"{prefix}_LOCAL_RANK")
            found.local_world_size = found.read(v, "local_world_size", f"{prefix}_LOCAL_SIZE")
            v.text("PMI_RANK"), v.text("PMI_SIZE")
            break
    else:
        if not v.has("PMI_RANK") and not v.has("PMI_SIZE"):
            return None
        found = Found("mpich")
        found.rank = found.need(v, "rank", "PMI_RANK")
        found.world_size = found.need(v, "world_size", "PMI_SIZE")
        local = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID")
        found.local_rank = found.read(v, "local_rank", *local)
        local = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE")
        found.local_world_size = found.read(v, "local_world_size", *local)
    name, found.job_id = v.text("PALS_APID", "PMI_JOBID", "MPIRUN_ID")
    if not found.job_id and v.has("SLURM_JOB_ID", "SLURM_STEP_ID"):
        # Hydra's proxies are one step of srun: the same on all ranks.
        found.job_id = f"{v.peek('SLURM_JOB_ID')}.{v.peek('SLURM_STEP_ID')}"
        found.origins["job_id"] = f"SLURM_JOB_ID.SLURM_STEP_ID={found.job_id}"
    if not found.job_id and found.local_world_size == found.world_size:
        # Hydra exports no name of the job.  On one host the process that started us is one.
        found.job_id = launcher_process(v)
        if found.job_id:
            found.origins["job_id"] = "the launcher's process id and start time"
    return _mpi(v, found, name)


def _mpi(v: Variables, found: Found, job_variable: str) -> Found:
    if job_variable:
        found.origins["job_id"] = f"{job_variable}={found.job_id}"
    found.check_local()
    if found.local_world_size is not None:
        found.several_hosts = found.local_world_size != found.world_size
    if v.has("SLURM_STEP_ID", "SLURM_PROCID"):
        found.doubts.append(
            f"SLURM_PROCID={v.peek('SLURM_PROCID')} belongs to the daemon that {found.launcher} "
            f"started through srun: {found.origins['rank']} is used"
        )
    return found


def launcher_process(v: Variables, proc: str = "/proc") -> str:
    """The nearest ancestor that did not get this rank's PMI variables: `pid namespace.pid.start`.

    Shells and wrappers between the launcher and the rank inherit them, so all local ranks end at
    the same process.  '' if the ancestors cannot be seen (a container for each rank).
    """
    names = [name for name in ("PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT") if v.has(name)]
    mine = {f"{name}={v.peek(name)}".encode() for name in names}
    pid = os.getppid()
    while pid > 0:
        try:
            with open(f"{proc}/{pid}/environ", "rb") as stream:
                inherited = set(stream.read().split(b"\0"))
        except PermissionError:
            inherited = set()  # another user's: a system daemon, not one of our wrappers
        except OSError:
            return ""
        status = process_status(pid, proc)
        if status is None:
            return ""
        if not mine <= inherited:
            return f"{namespace('pid', proc)}.{pid}.{status[1]}"
        pid = status[0]
    return ""


def process_status(pid: int, proc: str = "/proc") -> tuple[int, int] | None:
    """(parent, start time in ticks since boot) from /proc/PID/stat; None if it is gone."""
    try:
        with open(f"{proc}/{pid}/stat") as stream:
            words = stream.read().rpartition(")")[2].split()  # the name may hold blanks
        return int(words[1]), int(words[19])
    except (OSError, ValueError, IndexError):
        return None


def namespace(kind: str, proc: str = "/proc") -> str:
    """Inode number of this process's namespace of that kind; '' where /proc does not show it."""
    try:
        return str(os.stat(f"{proc}/self/ns/{kind}").st_ino)
    except OSError:
        return ""


def pmix(v: Variables) -> Found | None:
    """PMIX_RANK has no companion with the size: WORLD_SIZE must come from the user."""
    if not v.has("PMIX_RANK"):
        return None
    found = Found("pmix")
    found.rank = found.need(v, "rank", "PMIX_RANK")
    found.world_size = found.need(v, "world_size", "WORLD_SIZE")
    found.local_rank = found.read(v, "local_rank", "LOCAL_RANK")
    found.local_world_size = found.read(v, "local_world_size", "LOCAL_WORLD_SIZE")
    name, found.job_id = v.text("PMIX_NAMESPACE")
    return _mpi(v, found, name)


def leftovers(v: Variables) -> Found | None:
    """No launcher is complete: RANK and WORLD_SIZE without an endpoint, or a mistake."""
    if v.has("RANK") or (v.has("WORLD_SIZE") and v.peek("WORLD_SIZE") != "1"):
        return _torch_variables(v, "torchrun")
    if v.has("MASTER_ADDR"):
        raise LaunchError(
            f"MASTER_ADDR={v.peek('MASTER_ADDR')!r} is set, but RANK and WORLD_SIZE are not; set "
            "them, pass rank= and world_size=, or unset MASTER_ADDR (COMMKIT_LAUNCHER=none does "
            "as if it were)"
        )
    return None


def alone(v: Variables) -> Found:
    found = Found("none", rank=0, world_size=1, local_rank=0, local_world_size=1)
    for name in ("rank", "world_size", "local_rank", "local_world_size"):
        found.origins[name] = "no launcher"
    name = "SLURM_NTASKS" if v.has("SLURM_NTASKS") else "SLURM_NPROCS"
    if v.peek(name) not in ("", "0", "1"):
        found.doubts.append(
            f"{name}={v.peek(name)}: that many tasks were allocated, but this process was not "
            "started by srun: it is a world of one"
        )
    return found


#: In this order; each but the last two is also a value of COMMKIT_LAUNCHER.
LAUNCHERS: dict[str, Callable[[Variables], Found | None]] = {
    "torchrun": torchrun,
    "slurm": slurm,
    "openmpi": openmpi,
    "mpich": mpich,
    "pmix": pmix,
    "kubernetes": pods.kubernetes,
}


def find(v: Variables, forced: str = "", explicit: bool = False) -> Found:
    """What started this process; `forced` (COMMKIT_LAUNCHER) reads that launcher's variables only.

    explicit: rank or world size are arguments, so that torch's variables may be half there.

    Raises LaunchError if the variables contradict one another or are half there.
    """
    if forced == "none":
        return alone(v)
    if forced:
        found = LAUNCHERS[forced](v)
        if found is None and forced == "torchrun" and v.has("RANK", "WORLD_SIZE"):
            found = _torch_variables(v, "torchrun")
        if found is None:
            raise LaunchError(
                f"COMMKIT_LAUNCHER={forced!r}, but {forced} has not set its variables in this "
                "process; unset COMMKIT_LAUNCHER, or start the program by that launcher"
            )
        found.check_local()
        return found
    for name, read in LAUNCHERS.items():
        if name == "slurm" and carries_daemons(v):
            continue
        if (found := read(v)) is not None:
            if found.launcher not in ("torchrun", "kubernetes", "pmix"):
                _stray(v, found)
            break
    else:
        found = (None if explicit else leftovers(v)) or alone(v)
    found.check_local()
    return found


def _stray(v: Variables, found: Found) -> None:
    for name, value in (("RANK", found.rank), ("WORLD_SIZE", found.world_size)):
        if v.has(name) and v.peek(name) != str(value):
            found.doubts.append(
                f"{name}={v.peek(name)} is ignored: torch's own variables (RANK, WORLD_SIZE, "
                f"MASTER_ADDR, MASTER_PORT) are not all set, and {found.launcher} says {value}"
            )
