"""A rank's view of the agent tree: join, then gather, broadcast, agree, share keys, leave.

The work is done by the host's `commkit-agent`; this module turns a LaunchSpec into a join request
and the native module's refusals into commkit's errors.  Times are seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commkit import _C
from commkit.errors import (
    CommkitError,
    DigestMismatch,
    JoinError,
    JoinTimeout,
    OverlayError,
    OverlayTimeout,
    RankDied,
    UsageError,
)
from commkit.launch import LaunchSpec
from commkit.settings import Settings, load

log = logging.getLogger("commkit")

AGENT = Path(__file__).with_name("commkit-agent")

#: For how long a name that does not resolve is tried again, where the launcher gives no reason to
#: wait longer.
DNS_PATIENCE = 10.0

#: Bytes of the message in which rank 0 says by MPI where the root is.
_MPI_BYTES = 4096

#: Seconds between two looks at who has died, while members of a group are waited for.
_LOOK_AROUND = 0.5

_ERRORS: dict[str, type[CommkitError]] = {
    "join": JoinError,
    "join-timeout": JoinTimeout,
    "died": RankDied,
    "mismatch": DigestMismatch,
    "timeout": OverlayTimeout,
    "agent": OverlayError,
    "usage": UsageError,
}


@contextlib.contextmanager
def native_errors() -> Iterator[None]:
    """The one place where the native module's Failure(kind, text) becomes a commkit error."""
    try:
        yield
    except _C.Failure as failure:
        kind, text = failure.args
        raise _ERRORS.get(kind, OverlayError)(text) from None


def _notice(kind: str, text: str) -> None:
    log.log(logging.ERROR if kind == "died" else logging.WARNING, "%s", text)


@dataclass(frozen=True, slots=True)
class Identity:
    """What the world told this rank when it had formed."""

    epoch: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    hosts: int
    host_index: int
    store_host: str  # ::1 where the host has it, else 127.0.0.1
    store_port: int  # keys begin with `store_token` and a slash
    store_token: str
    agent_pid: int
    agent_log: str
    interface: str  # of the address by which this host reaches the others; "" on a single host


class World:
    """A formed world.  Methods raise OverlayTimeout, RankDied, DigestMismatch or OverlayError."""

    def __init__(self, client: _C.Client, spec: LaunchSpec) -> None:
        info = client.info
        self._client = client
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self.spec = spec
        if was := info.get("local_rank_was"):
            log.warning(
                "rank %d: the launcher's local rank %s does not fit this host's ranks: %s of %s",
                spec.rank,
                was,
                info["local_rank"],
                info["local_size"],
            )
        self.identity = Identity(
            epoch=int(info["epoch"]),
            rank=spec.rank,
            world_size=spec.world_size,
            local_rank=int(info["local_rank"]),
            local_world_size=int(info["local_size"]),
            hosts=int(info["hosts"]),
            host_index=int(info["host_index"]),
            store_host=info["store_host"],
            store_port=int(info["store_port"]),
            store_token=info["store_token"],
            agent_pid=int(info["agent_pid"]),
            agent_log=info["log"],
            interface=info["interface"],
        )
        atexit.register(self._at_exit)

    def _tag(self, tag: str) -> str:
        # The n-th use of a tag meets the n-th use of that tag elsewhere, whatever else a rank did.
        with self._lock:
            count = self._counts[tag] = self._counts.get(tag, -1) + 1
        return f"{tag}#{count}"

    def gather(
        self, payload: bytes, dst: int = 0, *, tag: str = "gather", timeout: float = 300.0
    ) -> list[bytes] | None:
        """Every rank's payload in rank order at rank `dst`, None elsewhere."""
        with native_errors():
            return self._client.gather(self._tag(tag), payload, dst, self.spec.rank, timeout)

    def all_gather(
        self, payload: bytes, *, tag: str = "all_gather", timeout: float = 300.0
    ) -> list[bytes]:
        """Every rank's payload at every rank: O(N^2) bytes over the job, for small payloads."""
        with native_errors():
            result = self._client.gather(self._tag(tag), payload, -1, self.spec.rank, timeout)
        assert result is not None
        return result

    def broadcast(
        self, payload: bytes | None, src: int = 0, *, tag: str = "broadcast", timeout: float = 300.0
    ) -> bytes:
        """The payload of rank `src` (None elsewhere) at every rank."""
        with native_errors():
            return self._client.broadcast(self._tag(tag), payload, src, timeout)

    def barrier(self, *, tag: str = "barrier", timeout: float = 300.0) -> None:
        """Returns when every rank has called it: one reduction over the tree."""
        self.agree(b"", "barrier", tag=tag, timeout=timeout)

    def agree(
        self, digest: bytes, description: str, *, tag: str = "agree", timeout: float = 300.0
    ) -> None:
        """Raises DigestMismatch unless all digests are equal: it names the first rank that differs
        and quotes both descriptions."""
        with native_errors():
            self._client.agree(self._tag(tag), digest, description, timeout)

    @property
    def keys(self) -> _C.Client:
        """The key-value operations (set, get, add, ...), without torch; use native_errors()."""
        return self._client

    def note(self, key: bytes, value: bytes) -> None:
        """Sets a key of this rank's own without waiting until it is set."""
        with native_errors():
            self._client.note(key, value)

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        """While inside, the death of any rank breaks this rank's blocked store waits at once."""
        with native_errors():
            self._client.creating(True)
        try:
            yield
        finally:
            with contextlib.suppress(_C.Failure):
                self._client.creating(False)

    def connected(self, group: str, members: Sequence[int]) -> None:
        """Says that this rank is connected to `members`; leave() waits until they say so too."""
        outside = [rank for rank in members if not 0 <= rank < self.spec.world_size]
        if outside:
            raise UsageError(
                f"group {group!r}: rank {outside[0]} is outside a world of {self.spec.world_size}"
            )
        with native_errors():
            self._client.connected(group, list(members))

    def complete(self, group: str, members: Sequence[int], timeout: float = 5.0) -> bool:
        """Whether all members, fewer than the world's ranks, have called connected(...)."""
        with native_errors():
            return self._client.check([_fence_key(group, members)], timeout)

    def meet(self, group: str, members: Sequence[int], timeout: float) -> None:
        """Waits until all members have called it for `group`, a name that is used once.

        Raises OverlayTimeout at the deadline, RankDied as soon as anybody is reported lost.  Unlike
        connected() it leaves nothing that leave() would wait for.
        """
        if len(members) == self.spec.world_size:
            return self.barrier(tag=f"meet/{group}", timeout=timeout)
        deadline = time.monotonic() + timeout
        count = f"commkit:{min(members)}/met/{group}".encode()
        everybody = count + b"/all"
        with native_errors():
            if self._client.add(count, 1, timeout) == len(members):
                self._client.set(everybody, b"", max(0.0, deadline - time.monotonic()))
        while True:
            left = deadline - time.monotonic()
            try:
                with native_errors():
                    return self._client.wait([everybody], min(max(left, 0.0), _LOOK_AROUND))
            except OverlayTimeout:
                if failures := self.failures():
                    raise RankDied("; ".join(failures)) from None
                if left <= _LOOK_AROUND:
                    raise OverlayTimeout(
                        f"not all members of {group!r} came within {timeout:.0f} s"
                    ) from None

    def failures(self) -> list[str]:
        """Deaths and losses reported so far in this epoch, oldest first."""
        return self._client.failures()

    def leave(self, timeout: float = 30.0) -> bool:
        """Leaves the world behind a fence; False if members had not connected by the deadline."""
        atexit.unregister(self._at_exit)
        with native_errors():
            return self._client.leave(timeout)

    def abandon(self, reason: str) -> None:
        """Leaves at once because something failed; the other ranks are told, as of a death."""
        atexit.unregister(self._at_exit)
        with contextlib.suppress(_C.Failure):
            self._client.exiting(reason[:500])
        self._client.close()

    def _at_exit(self) -> None:
        # Only tells a crash from an ordinary end: one without a word is seen by its pidfd.
        error = getattr(sys, "last_value", None)
        reason = f"{type(error).__name__}: {error}" if error is not None else ""
        with contextlib.suppress(_C.Failure):
            self._client.exiting(reason[:500])


def _fence_key(group: str, members: Sequence[int]) -> bytes:
    """The key that the agents set when a group's members are all there (session_leave.cc)."""
    return f"commkit:{min(members)}/fence/open/{group}".encode()


def _config(
    spec: LaunchSpec, settings: Settings, job_id: str, root_key: str, published: str = ""
) -> dict[str, str]:
    """The fields of a join request; csrc/overlay/config.h reads them."""
    here = {True: "yes", False: "no", None: "rank0"}[spec.root.here]
    unknown = -1
    return {
        "agent": str(AGENT),
        "job_id": job_id,
        "host_key": spec.host.key,
        "machine": f"{spec.host.boot_id}/{spec.host.netns}",
        "host_name": spec.host.override or spec.host.hostname,
        "root_kind": "published" if spec.root.kind == "mpi" else spec.root.kind,
        "root_host": spec.root.host,
        "root_ports": ",".join(str(port) for port in spec.root.ports),
        "root_published": published,
        "root_path": spec.root.path,
        "root_here": here,
        "root_key": root_key,
        "rank": str(spec.rank),
        "world_size": str(spec.world_size),
        "local_rank": str(unknown if spec.local_rank is None else spec.local_rank),
        "local_size": str(unknown if spec.local_world_size is None else spec.local_world_size),
        "placement": spec.placement,
        "dns_patience": "0" if spec.patient_dns else str(DNS_PATIENCE),
        "ifname": settings.ifname,
        "port": str(settings.root_port),
        "port_low": str(settings.agent_ports[0]),
        "port_high": str(settings.agent_ports[1]),
        "degree": str(settings.tree_degree),
        "secret": settings.secret,
        "log_dir": settings.log_dir,
        "heartbeat": str(settings.heartbeat),
    }


def _join_mpi(
    spec: LaunchSpec, settings: Settings, timeout: float, notice: Callable[[str, str], None]
) -> _C.Client:
    """Rank 0's agent binds a free port; one MPI_Bcast tells the others where and for which job."""
    mpi: Any = importlib.import_module("mpi4py.MPI")
    comm = mpi.COMM_WORLD
    first = spec.rank if spec.launcher_rank is None else spec.launcher_rank
    if comm.Get_rank() != first or comm.Get_size() != spec.world_size:
        raise JoinError(
            f"rank {first} of {spec.world_size} from the environment is rank "
            f"{comm.Get_rank()} of {comm.Get_size()} in MPI_COMM_WORLD; set MASTER_ADDR and "
            "MASTER_PORT, or start all ranks by one mpiexec"
        )
    deadline = time.monotonic() + timeout

    def left() -> float:
        return max(0.0, deadline - time.monotonic())

    def told(message: str) -> str:
        """The one MPI_Bcast, of a buffer of fixed size, with a deadline."""
        buffer = bytearray(message.encode().ljust(_MPI_BYTES, b"\0"))
        request = comm.Ibcast([buffer, mpi.BYTE], root=0)
        while not request.Test():
            if left() <= 0:
                raise JoinTimeout(
                    "the deadline passed: rank 0 has not said by MPI where the root is"
                )
            time.sleep(0.0005)
        return buffer.rstrip(b"\0").decode()

    if first == 0:
        nonce = secrets.token_hex(16)
        try:
            client = _C.Client(_config(spec, settings, nonce, nonce), left(), notice)
            endpoint = client.root_endpoint(left())
        except BaseException:
            # Sent even now: the others are waiting for it.
            told("")
            raise
        told(f"{nonce} {endpoint}")
        return client
    nonce, _, endpoint = told("").partition(" ")
    if not endpoint:
        raise JoinError("rank 0 could not start its agent; see its own error")
    return _C.Client(_config(spec, settings, nonce, nonce, endpoint), left(), notice)


def join(
    spec: LaunchSpec,
    timeout: float,
    *,
    settings: Settings | None = None,
    notice: Callable[[str, str], None] = _notice,
) -> World:
    """Joins the world that `spec` describes; returns when every rank has joined.

    `timeout` (seconds) is one deadline for all of it.  Raises JoinTimeout naming the missing ranks,
    or JoinError: a duplicate rank, unequal world sizes, a rank that died while joining.
    """
    settings = settings or load()
    if not os.access(AGENT, os.X_OK):
        raise OverlayError(
            f"{AGENT} is missing or not executable: build it (pip install ., or make native)"
        )
    deadline = time.monotonic() + timeout
    with native_errors():
        if spec.root.kind == "mpi":
            client = _join_mpi(spec, settings, timeout, notice)
        else:
            root_key = f"{spec.root.host}:{','.join(map(str, spec.root.ports))}:{spec.root.path}"
            config = _config(spec, settings, spec.job_id, root_key)
            client = _C.Client(config, timeout, notice)
        try:
            client.formed(max(0.0, deadline - time.monotonic()))
        except BaseException:
            client.close()  # now: a traceback may keep the object for long
            raise
    return World(client, spec)
