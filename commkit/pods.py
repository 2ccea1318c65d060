"""Pods -> Found: Kubeflow, JobSet and Indexed Jobs, LeaderWorkerSet; one process a pod is a rank.

Operators set torchrun's variables (PET_*) in every pod, whether its command is torchrun or python;
below torchrun LOCAL_RANK is set, and nothing here is asked.  What says which pod this is, but not
how many make the world, is an error and never a world of one.
"""

from __future__ import annotations

from commkit.errors import LaunchError
from commkit.found import Found, Variables


def kubernetes(v: Variables) -> Found | None:
    """Indexed Jobs and JobSets (JOB_COMPLETION_INDEX), Kubeflow (PET_*), LWS_*."""
    if not v.has("JOB_COMPLETION_INDEX") and not v.has("PET_NODE_RANK"):
        _refuse(v)
        return _leader_worker_set(v)
    found = Found("kubernetes")
    one_process_a_pod(v, found)
    found.rank = found.need(v, "rank", "RANK", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
    nodes = v.peek("PET_NNODES")
    if ":" in nodes and not v.has("WORLD_SIZE"):
        raise LaunchError(
            f"PET_NNODES={nodes!r}: an elastic number of pods needs torchrun; start the program "
            "by torchrun, or give one number"
        )
    names = ("PET_NNODES", "WORLD_SIZE") if not v.has("WORLD_SIZE") else ("WORLD_SIZE",)
    found.world_size = found.need(v, "world_size", *names)
    found.local_rank = found.read(v, "local_rank", "LOCAL_RANK")
    found.local_world_size = found.read(v, "local_world_size", "LOCAL_WORLD_SIZE")
    if v.has("PET_MASTER_ADDR", "PET_MASTER_PORT"):
        found.root = ("PET_MASTER_ADDR", "PET_MASTER_PORT")
    name_job(v, found)
    return found


def _leader_worker_set(v: Variables) -> Found | None:
    """One group of a LeaderWorkerSet is a world; its leader is worker 0.  No port is given."""
    if not v.has("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"):
        return None
    found = Found("kubernetes")
    found.rank = found.need(v, "rank", "LWS_WORKER_INDEX")
    found.world_size = found.need(v, "world_size", "LWS_GROUP_SIZE")
    found.root = ("LWS_LEADER_ADDRESS", "")
    # Each group has a leader of its own, whose address names the group.
    found.job_id = found.port_key = v.peek("LWS_LEADER_ADDRESS")
    found.origins["job_id"] = f"LWS_LEADER_ADDRESS={found.job_id}"
    return found


def _refuse(v: Variables) -> None:
    nodes = v.peek("PET_NNODES")
    if v.has("PET_RDZV_ENDPOINT") and nodes not in ("", "1", "1:1") and not v.has("RANK"):
        # An elastic PyTorchJob: its pods are not numbered.
        raise LaunchError(
            f"PET_RDZV_ENDPOINT={v.peek('PET_RDZV_ENDPOINT')!r} and PET_NNODES={nodes!r}: torchrun "
            "gives the ranks of these pods; start the program by torchrun (COMMKIT_LAUNCHER=none "
            "makes this process a world of one)"
        )
    if v.has("VC_TASK_INDEX") and not v.has("RANK"):
        pods = sum(int(n) for n in v.matching("VC_.+_NUM").values() if n.isdigit())
        if pods != 1:
            raise LaunchError(
                f"VC_TASK_INDEX={v.peek('VC_TASK_INDEX')!r} numbers the pods of one Volcano task, "
                "not the ranks of a world; add Volcano's pytorch plugin to the job, or set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT (COMMKIT_LAUNCHER=none makes this process "
                "a world of one)"
            )


def name_job(v: Variables, found: Found) -> None:
    # Kubernetes sets no variable with the job's name; manifests that need it use these.
    name, found.job_id = v.text("JOBSET_NAME", "JOB_NAME")
    if name:
        found.origins["job_id"] = f"{name}={found.job_id}"


def one_process_a_pod(v: Variables, found: Found) -> None:
    """Raises LaunchError where torchrun should have split the pod into several ranks."""
    name, value = v.text("PET_NPROC_PER_NODE")
    if not name or value == "1" or v.has("LOCAL_RANK"):
        return
    if value.isdigit():
        raise LaunchError(
            f"{name}={value!r} asks for several processes a pod, which torchrun starts; this one "
            "was not started by torchrun: use `torchrun SCRIPT` as the pod's command"
        )
    if not v.has("RANK", "WORLD_SIZE"):
        raise LaunchError(
            f"{name}={value!r} leaves the number of processes a pod to torchrun, and this one was "
            "not started by torchrun: use `torchrun SCRIPT` as the pod's command, or ask for one "
            "process a pod (numProcPerNode: 1)"
        )
    # The default of a PyTorchJob; its WORLD_SIZE then counts pods, as `python SCRIPT` needs it.
    found.doubts.append(
        f"{name}={value} is torchrun's to read, and this process was not started by torchrun: it "
        "is the only rank of its pod"
    )
