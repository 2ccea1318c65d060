"""Environment and arguments of a launcher -> LaunchSpec: who am I, how many, where is the root.

launchers.py reads each launcher's variables; here it is decided who wins and how the root is found:
explicit arguments, torch's own variables (torchrun), srun, Open MPI, PMI, PMIx, Kubernetes, and a
world of one if there is none of these.  Nothing here opens a socket, starts a process or imports
torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from commkit import launchers
from commkit.endpoint import (
    EPHEMERAL_FILE,
    Endpoint,
    derived_ports,
    ephemeral_range,
    parse_address,
    parse_host,
    parse_port,
)
from commkit.errors import LaunchError, UsageError
from commkit.found import NUMBER, Found, Variables
from commkit.settings import Settings, load

#: How many ports the root may try where nobody gave one.
ROOT_PORTS = 8

_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1")


@dataclass(frozen=True, slots=True)
class RootHint:
    """Where the root of the agent tree is, or how to find it.

    kind      meaning
    local     every rank is on this host: no network is needed
    endpoint  the root agent listens at `host`, on the first port of `ports` that it can bind
    elastic   torchrun's own TCPStore listens at host:ports[0]; the root publishes itself there
    file      the root writes its endpoint into `path`, on a file system that all hosts share
    mpi       rank 0 tells the others by one MPI_Bcast (mpi4py)
    """

    kind: str
    host: str = ""
    ports: tuple[int, ...] = ()
    path: str = ""
    here: bool | None = None  # is the root on this host?  None: it is where rank 0 is


@dataclass(frozen=True, slots=True)
class HostIdentity:
    boot_id: str
    netns: str
    mntns: str
    hostname: str
    override: str = ""  # COMMKIT_HOST_ID
    #: What files that describe the fabric may call it, the surest first.
    names: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Equal for two processes exactly when one agent serves both."""
        return self.override or f"{self.boot_id}/{self.netns}"

    @property
    def machine(self) -> str:
        """Equal for all containers of one physical host, whose names and networks may differ."""
        return self.boot_id

    def shares_memory_with(self, other: HostIdentity) -> bool:
        """Same machine and same container: /dev/shm and CUDA IPC reach from one to the other."""
        return (self.machine, self.mntns) == (other.machine, other.mntns)


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    launcher: str  # torchrun, slurm, openmpi, mpich, pmix, kubernetes, arguments, none
    rank: int
    world_size: int
    local_rank: int | None  # None: the agents find it out
    local_world_size: int | None
    host: HostIdentity
    root: RootHint
    job_id: str
    patient_dns: bool = False  # retry an unresolvable name until the deadline, not for 10 s
    #: Where a placement has moved this process: the rank that the launcher gave it, and the digest
    #: and name of the placement, which agents compare.
    launcher_rank: int | None = None
    placement: str = ""
    origins: dict[str, str] = field(default_factory=dict)  # field -> "VARIABLE=value"
    ignored: tuple[str, ...] = ()  # variables of other launchers that were seen and not used
    doubts: tuple[str, ...] = ()  # what looks wrong but does not stop the job


def host_identity(settings: Settings | None = None, node_name: str = "") -> HostIdentity:
    """This process's host: (boot id, network namespace), the mount namespace, the name to show.

    Reads /proc only: no subprocess, no resolver, no NVML.  Where /proc hides the boot id
    (some sandboxes) the host's name stands in for it.  `node_name` is the launcher's name of it.
    """
    settings = load() if settings is None else settings
    name = socket.gethostname()
    try:
        boot = _first_bytes("/proc/sys/kernel/random/boot_id").decode().strip()
    except OSError:
        boot = f"name:{name}"
    return HostIdentity(
        boot_id=boot,
        netns=launchers.namespace("net"),
        mntns=launchers.namespace("mnt"),
        hostname=name,
        override=settings.host_id,
        names=_names(settings, name, node_name),
    )


def _names(settings: Settings, hostname: str, node_name: str) -> tuple[str, ...]:
    for told in (settings.host_name, settings.host_id):
        if told:
            return (told,)
    return tuple(dict.fromkeys(filter(None, (node_name, hostname))))


def _first_bytes(path: str) -> bytes:
    # Without the layers of open(): each rank does this while the others wait for it.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 256)
    finally:
        os.close(fd)


def resolve(
    environ: Mapping[str, str] | None = None,
    *,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    settings: Settings | None = None,
) -> LaunchSpec:
    """Who am I, how many are we, where is the root: from arguments and the environment.

    `init_method`, `rank` and `world_size` mean what they mean in torch's init_process_group
    (-1: not given): arguments win over env://'s variables, tcp:// and file:// need both numbers,
    as arguments or as ?rank=R&world_size=W but not as both.

    Raises UsageError for a wrong argument and LaunchError for an environment that is wrong,
    incomplete or contradictory; both name the variable or argument and its value.
    """
    v = Variables(os.environ if environ is None else environ)
    settings = load(environ) if settings is None else settings
    method = _parse_method(init_method)
    rank, world_size = _merge(method, rank, world_size)
    found = _found(v, settings, rank, world_size)
    if found.world_size < 1 or not 0 <= found.rank < found.world_size:
        raise LaunchError(
            f"{found.origins.get('rank', 'rank')} does not fit "
            f"{found.origins.get('world_size', 'world size')}: expected 0 <= rank < world size; "
            "correct one of them (a heterogeneous Slurm step or ranks numbered a host need "
            "RANK and WORLD_SIZE of the whole job)"
        )
    host = host_identity(settings, v.peek("SLURMD_NODENAME"))
    if found.world_size == 1:
        root = RootHint("local")
        found.job_id = "/".join(filter(None, (settings.job_id, "one", _this_process())))
        found.origins["job_id"] = "this process: a world of one meets nobody"
        found.origins["root"] = "a world of one"
    else:
        root = _root(v, settings, method, found)
        if settings.job_id:
            found.job_id = settings.job_id
            found.origins["job_id"] = f"COMMKIT_JOB_ID={settings.job_id}"
    _doubt_root(v, found, root)
    return LaunchSpec(
        launcher=found.launcher,
        rank=found.rank,
        world_size=found.world_size,
        local_rank=found.local_rank,
        local_world_size=found.local_world_size,
        host=host,
        root=root,
        job_id=found.job_id,
        # A pod's name appears in the DNS only when the pod runs, minutes later perhaps.
        patient_dns=found.launcher == "kubernetes" or v.has("KUBERNETES_SERVICE_HOST"),
        origins=found.origins,
        ignored=v.ignored(),
        doubts=tuple(found.doubts),
    )


@dataclass(frozen=True, slots=True)
class _Method:
    scheme: str = "env"
    text: str = "env://"
    endpoint: Endpoint = field(default_factory=lambda: Endpoint(""))
    path: str = ""
    rank: int = -1
    world_size: int = -1


def _parse_method(text: str | None) -> _Method:
    if not text:
        return _Method()
    scheme, mark, rest = text.partition("://")
    if not mark or scheme not in ("env", "tcp", "file"):
        raise UsageError(f"init_method={text!r}: expected env://, tcp://HOST:PORT or file:///PATH")
    body, _, query = rest.partition("?")
    numbers = {"rank": -1, "world_size": -1}
    for pair in filter(None, query.split("&")):
        key, _, value = pair.partition("=")
        if key == "use_libuv":
            continue  # chooses the implementation of torch's own store: nothing here
        if key not in numbers or not NUMBER.fullmatch(value):
            raise UsageError(
                f"init_method={text!r}: {pair!r}: expected rank=NUMBER or world_size=NUMBER"
            )
        numbers[key] = int(value)
    if scheme == "tcp":
        endpoint = parse_address(body.rstrip("/"), "init_method tcp://")
        if not endpoint.port:
            raise UsageError(f"init_method={text!r}: expected tcp://HOST:PORT; the port is missing")
        return _Method(scheme, text, endpoint, "", numbers["rank"], numbers["world_size"])
    if scheme == "file" and not body.startswith("/"):
        raise UsageError(
            f"init_method={text!r}: expected file:///ABSOLUTE/PATH on a file system that all "
            "hosts share (three slashes)"
        )
    if scheme == "env" and body:
        raise UsageError(f"init_method={text!r}: expected nothing but ?rank= after env://")
    path = body if scheme == "file" else ""
    return _Method(scheme, text, Endpoint(""), path, numbers["rank"], numbers["world_size"])


def _merge(method: _Method, rank: int, world_size: int) -> tuple[int, int]:
    """torch's rule: numbers come from the arguments or from the URL, never from both."""
    for name, value, low in (("rank", rank, 0), ("world_size", world_size, 1)):
        if value != -1 and value < low:
            raise UsageError(f"{name}={value}: expected {low} or more, or -1 for not given")
    in_url = method.rank != -1 or method.world_size != -1
    if in_url and (rank != -1 or world_size != -1):
        raise UsageError(
            f"init_method={method.text!r} holds rank or world_size, and they are arguments too; "
            "give them in one place"
        )
    rank = method.rank if in_url else rank
    world_size = method.world_size if in_url else world_size
    if method.scheme != "env" and -1 in (rank, world_size):
        missing = "rank" if rank == -1 else "world_size"
        raise UsageError(
            f"init_method={method.text!r} needs {missing}: pass {missing}=, or append "
            "?rank=R&world_size=W"
        )
    if rank >= world_size != -1:
        raise UsageError(f"rank={rank}: expected less than world_size={world_size}")
    return rank, world_size


def _found(v: Variables, settings: Settings, rank: int, world_size: int) -> Found:
    """The launcher's word, with explicit numbers in place of its own."""
    if rank == -1 and world_size == -1:
        return launchers.find(v, settings.launcher)
    told = Found("arguments")
    try:
        found = launchers.find(v, settings.launcher, explicit=True)
    except LaunchError as error:
        found = Found("none")
        told.doubts.append(f"the environment is not used: {error}")
    told.rank = _number(v, told, found, "rank", "RANK", rank, world_size)
    told.world_size = _number(v, told, found, "world_size", "WORLD_SIZE", world_size, world_size)
    if found.launcher == "none":
        return told
    told.doubts.extend(found.doubts)
    # The same processes with other numbers (rank = perm[RANK]) keep their places; another world
    # (workers spawned by a launcher's task, two steps joined) does not.  The size decides, not the
    # rank: a permutation has fixed points, and all ranks must decide alike.
    if found.world_size == told.world_size:
        told.local_rank, told.local_world_size = found.local_rank, found.local_world_size
        told.nodes, told.on_first_node = found.nodes, found.on_first_node
        told.job_id, told.port_key, told.root = found.job_id, found.port_key, found.root
        told.several_hosts = found.several_hosts
        told.origins = {**found.origins, **told.origins}
    return told


def _number(
    v: Variables, told: Found, found: Found, what: str, variable: str, given: int, world_size: int
) -> int:
    """The argument; else torch's variable, as torch would; else the launcher's word."""
    if given != -1:
        told.origins[what] = f"argument {what}={given}"
        return given
    value = told.read(v, what, variable)
    if value is not None:
        return value
    if found.launcher == "none" and world_size != 1:
        raise UsageError(
            f"{what}= was not given, and nothing in the environment says it; pass rank= and "
            f"world_size= together, or set {variable}"
        )
    told.origins[what] = found.origins.get(what, "a world of one")
    return int(getattr(found, what)) if found.launcher != "none" else 0


def _this_process() -> str:
    """Unique on this host: two pid namespaces can hold the same pid."""
    pid = os.getpid()
    status = launchers.process_status(pid)
    return f"{launchers.namespace('pid')}.{pid}.{status[1] if status else time.time_ns()}"


def _root(v: Variables, settings: Settings, method: _Method, found: Found) -> RootHint:
    if method.scheme == "file":
        found.job_id = ""  # the file is the meeting place
        found.origins.pop("job_id", None)
        found.origins["root"] = f"init_method={method.text}"
        return RootHint("file", path=method.path)
    if method.scheme == "tcp":
        return _tcp(v, settings, method, found)
    host_name, host = v.text(*filter(None, ("MASTER_ADDR", found.root[0])))
    port_name, port = v.text(*filter(None, ("MASTER_PORT", found.root[1])))
    elastic = v.text("TORCHELASTIC_USE_AGENT_STORE")[1] == "True"
    if host and (port or settings.root_port or found.port_key):
        address = parse_host(host, host_name, LaunchError).address
        number = parse_port(port, port_name, LaunchError) if port else 0
        found.origins["root"] = f"{host_name}={host}" + (f" {port_name}={port}" if port else "")
        if elastic and number:
            if not v.has("TORCHELASTIC_RUN_ID"):
                found.doubts.append(
                    "TORCHELASTIC_USE_AGENT_STORE=True without TORCHELASTIC_RUN_ID: torchrun did "
                    f"not start this process, so perhaps nobody serves {host}:{port}; unset it then"
                )
            return _elastic(settings, address, number, port_name)
        return RootHint("endpoint", address, _ports(settings, found, number))
    if host:
        raise LaunchError(
            f"{host_name}={host!r} is set, but MASTER_PORT is not; set MASTER_PORT or COMMKIT_PORT "
            "to the port (1-65535) that rank 0 shall listen on"
        )
    number = parse_port(port, port_name, LaunchError) if port else 0
    if found.several_hosts is False and found.job_id + settings.job_id:
        found.origins["root"] = found.origins.get("local_world_size", "one host")
        return RootHint("local")
    if found.nodes:
        if found.on_first_node is None:
            found.doubts.append(
                "neither SLURM_NODEID nor SLURMD_NODENAME is set: rank 0 is taken to be on the "
                f"first host, {found.nodes[0]}"
            )
        if ports := _ports(settings, found, number):
            return RootHint("endpoint", found.nodes[0], ports, here=found.on_first_node)
        raise LaunchError(
            f"the ephemeral range of {EPHEMERAL_FILE} leaves no port for the root; set "
            "COMMKIT_PORT, the same on every host"
        )
    return _without_endpoint(found, settings, port)


def _without_endpoint(found: Found, settings: Settings, port: str) -> RootHint:
    """Nobody says where rank 0 is: MPI can, if this is an MPI job."""
    if found.several_hosts is False:
        found.doubts.append(
            "nothing tells this job from another one of yours on this host: set COMMKIT_JOB_ID if "
            "two run at a time"
        )
        found.origins["root"] = found.origins.get("local_world_size", "one host")
        return RootHint("local")
    if found.launcher in ("openmpi", "mpich", "pmix"):
        if importlib.util.find_spec("mpi4py") is not None:
            if port:
                found.doubts.append(f"MASTER_PORT={port} is not used: MASTER_ADDR is not set")
            found.origins["root"] = "MPI_Bcast from rank 0 (mpi4py)"
            return RootHint("mpi")
        advice = (
            "set MASTER_ADDR and MASTER_PORT to rank 0's host and a free port, or install mpi4py"
        )
    else:
        advice = "set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there"
    raise LaunchError(
        f"MASTER_ADDR is not set, though {found.origins.get('world_size', 'the world has')}"
        f" makes a world of {found.world_size}: nothing says where rank 0 is; {advice}"
    )


def _tcp(v: Variables, settings: Settings, method: _Method, found: Found) -> RootHint:
    where = method.endpoint
    found.job_id = ""  # whoever comes to this endpoint is of this job, whatever started it
    found.origins.pop("job_id", None)
    found.origins["root"] = f"init_method={method.text}"
    owned = v.peek("TORCHELASTIC_USE_AGENT_STORE") == "True"
    master = v.peek("MASTER_ADDR").strip("[]"), v.peek("MASTER_PORT")
    if owned and master == (where.address, str(where.port)):
        return _elastic(settings, where.address, where.port, "MASTER_PORT")
    return RootHint("endpoint", where.address, _ports(settings, found, where.port))


def _elastic(settings: Settings, address: str, port: int, port_name: str) -> RootHint:
    if port == settings.root_port:
        name = "COMMKIT_ONE_PORT" if settings.one_port else "COMMKIT_PORT"
        raise LaunchError(
            f"{name}={settings.root_port} is {port_name}, on which torchrun's store listens; "
            "give the agents another port"
        )
    return RootHint("elastic", address, (port,))


def _ports(settings: Settings, found: Found, given: int) -> tuple[int, ...]:
    """COMMKIT_PORT, else the port that was given, else candidates that all ranks derive alike."""
    if settings.root_port:
        name = "COMMKIT_ONE_PORT" if settings.one_port else "COMMKIT_PORT"
        found.origins["root_port"] = f"{name}={settings.root_port}"
        return (settings.root_port,)
    if given:
        return (given,)
    found.origins["root_port"] = "derived from job, step and user"
    key = found.port_key or found.job_id or ",".join(found.nodes)
    return derived_ports(key, ROOT_PORTS, ephemeral_range())


def _doubt_root(v: Variables, found: Found, root: RootHint) -> None:
    loopback = _LOOPBACK.fullmatch(root.host)
    if loopback and found.several_hosts:
        found.doubts.append(
            f"MASTER_ADDR={root.host} is every host's own address, but the launcher names several "
            "hosts: the others will not find rank 0 there"
        )
    if root.kind in ("endpoint", "elastic") and not found.job_id:
        found.doubts.append(
            "the job has no name of its own: only the root's endpoint tells it from another job; "
            "COMMKIT_JOB_ID gives it one"
        )
