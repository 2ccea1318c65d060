"""A torch Store served by the host's own agent.

Torch's C++ TCPStore client talks to the agent over loopback: no central server, no reverse look-up
on the fabric, no GIL.  Its wire protocol is not documented: with a torch that is not among PROVEN
every operation is tried once per process before the store is used; if torch speaks another dialect,
a Python Store over the agent's Unix socket takes its place.  COMMKIT_STORE=wire|python forces one
of them.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from commkit import _C
from commkit.errors import OverlayError
from commkit.overlay import World
from commkit.settings import Settings, load

log = logging.getLogger("commkit")

#: Longer than any answer of an idle agent on the same host; a dialect that gets none has failed.
PROBE_TIMEOUT = timedelta(seconds=10)

#: Releases of torch (major, minor) whose client has passed the probe against this agent.  Between
#: two releases operations have only ever been added; previews and builds from source are probed.
PROVEN = frozenset({(2, 6), (2, 13), (2, 14)})
_RELEASE = re.compile(r"([0-9]+)\.([0-9]+)\.[0-9]+(\+.*)?")

#: The verdict of the probe in this process, and why.
_probed: dict[str, str] = {}
_probe_lock = threading.Lock()


def _forget() -> None:
    global _probe_lock
    _probe_lock = threading.Lock()  # in a forked child: another thread may have held it


os.register_at_fork(after_in_child=_forget)

#: C++ owners do not keep a Python Store's Python half alive; losing it aborts the process.
_kept: list[AgentStore] = []

_QueueEmpty: type[Exception] = getattr(dist, "QueueEmptyError", dist.DistStoreError)


class AgentStore(Store):
    """A Store over the agent's native connection, with torch's semantics and errors.

    DistStoreError: a wait outlived the store's timeout.  DistNetworkError: the agent is gone, or a
    rank died while groups were being created.  ValueError: `add` to a value that is no number.
    """

    def __init__(self, client: _C.Client) -> None:
        super().__init__()
        self._client = client
        _kept.append(self)

    def _seconds(self, timeout: timedelta | None = None) -> float:
        limit: timedelta = super().timeout if timeout is None else timeout  # type: ignore[misc]
        return limit.total_seconds()

    def set(self, key: str, value: bytes | str) -> None:
        try:
            self._client.set(_raw(key), _raw(value), self._seconds())
        except _C.Failure as failure:
            _raise(failure, "set", [key])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        try:
            return self._client.get([_raw(key) for key in keys], self._seconds())
        except _C.Failure as failure:
            _raise(failure, "get", keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        if len(keys) != len(values):
            raise ValueError(f"multi_set: {len(keys)} keys but {len(values)} values")
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        try:
            return self._client.add(_raw(key), value, self._seconds())
        except _C.Failure as failure:
            _raise(failure, "add", [key])

    def compare_set(
        self, key: str, expected_value: bytes | str, desired_value: bytes | str
    ) -> bytes:
        try:
            return self._client.compare_set(
                _raw(key), _raw(expected_value), _raw(desired_value), self._seconds()
            )
        except _C.Failure as failure:
            _raise(failure, "compare_set", [key])

    def append(self, key: str, value: bytes | str) -> None:
        try:
            self._client.append(_raw(key), _raw(value), self._seconds())
        except _C.Failure as failure:
            _raise(failure, "append", [key])

    def check(self, keys: Sequence[str]) -> bool:
        try:
            return self._client.check([_raw(key) for key in keys], self._seconds())
        except _C.Failure as failure:
            _raise(failure, "check", keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        try:
            self._client.wait([_raw(key) for key in keys], self._seconds(timeout))
        except _C.Failure as failure:
            _raise(failure, "wait", keys)

    def delete_key(self, key: str) -> bool:
        try:
            return self._client.delete(_raw(key), self._seconds())
        except _C.Failure as failure:
            _raise(failure, "delete_key", [key])

    def num_keys(self) -> int:
        try:
            return self._client.num_keys(self._seconds())
        except _C.Failure as failure:
            _raise(failure, "num_keys", [])

    def list_keys(self) -> list[str]:
        try:
            keys = self._client.list_keys(self._seconds())
        except _C.Failure as failure:
            _raise(failure, "list_keys", [])
        return [key.decode("utf-8", "surrogateescape") for key in keys]

    def queue_push(self, key: str, value: bytes | str) -> None:
        try:
            self._client.queue_push(_raw(key), _raw(value), self._seconds())
        except _C.Failure as failure:
            _raise(failure, "queue_push", [key])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        try:
            return self._client.queue_pop(_raw(key), block, self._seconds())
        except _C.Failure as failure:
            if not block and failure.args[0] in ("timeout", "usage"):
                raise _QueueEmpty(f"queue {key!r} is empty") from None
            _raise(failure, "queue_pop", [key])

    def queue_len(self, key: str) -> int:
        try:
            return self._client.queue_len(_raw(key), self._seconds())
        except _C.Failure as failure:
            _raise(failure, "queue_len", [key])

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> AgentStore:
        # The native client may be used by several threads at once.
        return self

    # Torch's C++ side looks these two up under their C++ names.
    deleteKey = delete_key
    getNumKeys = num_keys


def _raw(text: bytes | str) -> bytes:
    return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else bytes(text)


def _raise(failure: _C.Failure, operation: str, keys: Sequence[str]) -> NoReturn:
    kind, text = failure.args
    shown = ", ".join(repr(key) for key in keys[:3]) + (", ..." if len(keys) > 3 else "")
    message = f"{operation}({shown}): {text}"
    if kind in ("timeout", "join-timeout"):
        raise dist.DistStoreError(message) from None
    if kind == "usage":
        raise ValueError(message) from None
    raise dist.DistNetworkError(message) from None


def open_store(world: World, timeout: float, *, settings: Settings | None = None) -> Store:
    """The world's store as torch takes it; keys live as long as the world's epoch.

    `timeout` (seconds) bounds the connection and every later wait, until set_timeout changes it.
    Raises OverlayError if COMMKIT_STORE=wire and torch's client does not understand the agent.
    """
    kind = (settings or load()).store
    wait = timedelta(seconds=max(timeout, 0.001))
    if kind != "python":
        fault = ""
        with _probe_lock:
            try:
                return _open_wire(world, wait)
            except (RuntimeError, AttributeError, TypeError, ValueError) as error:
                # A death while the store was being opened is not the dialect's fault.
                if world.failures():
                    raise
                fault = (
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
        if kind == "wire":
            raise OverlayError(
                f"COMMKIT_STORE=wire: the TCPStore client of torch {torch.__version__} failed "
                f"against the agent at port {world.identity.store_port} ({fault}); "
                f"unset COMMKIT_STORE, or set it to python; the agent's log is "
                f"{world.identity.agent_log}"
            )
        log.warning(
            "torch %s's TCPStore client does not suit the agent (%s): using a Python Store",
            torch.__version__,
            fault,
        )
    store = AgentStore(world.keys)
    store.set_timeout(wait)
    return store


def _open_wire(world: World, wait: timedelta) -> Store:
    verdict = _probed.get(torch.__version__)
    if verdict:
        raise RuntimeError(verdict)
    client = TCPStore(
        world.identity.store_host,
        world.identity.store_port,
        world_size=None,
        is_master=False,
        timeout=min(wait, PROBE_TIMEOUT),
        wait_for_workers=False,
    )
    store: Store = PrefixStore(world.identity.store_token, client)
    if verdict is None and not _proven(torch.__version__):
        try:
            # A key of this rank's own: the probe stays on the host.
            _probe_within(store, world.identity.rank)
        except Exception as error:
            if not world.failures():
                _probed[torch.__version__] = f"{type(error).__name__}: {error}"
            raise
        _probed[torch.__version__] = ""
    store.set_timeout(wait)
    return store


def _proven(version: str) -> bool:
    """Whether this is a release that the probe has passed with."""
    release = _RELEASE.fullmatch(version)
    return release is not None and (int(release[1]), int(release[2])) in PROVEN


def _probe_within(store: Store, rank: int) -> None:
    # Of the client's operations only waits have a deadline: an answer that it does not understand
    # may leave it reading for ever, so it is tried in a thread that can be left behind.
    outcome: list[Exception | None] = []

    def attempt() -> None:
        try:
            probe(store, f"commkit:{rank}/probe", whole=rank == 0)
            outcome.append(None)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=attempt, name="commkit-probe", daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT.total_seconds())
    if not outcome:
        raise RuntimeError(f"no answer within {PROBE_TIMEOUT.total_seconds():.0f} s")
    if outcome[0] is not None:
        raise outcome[0]


def probe(store: Any, key: str, *, whole: bool = True) -> None:
    """Tries every operation that this torch's Store has, on `key` and one more, and removes both.

    `whole` includes num_keys, which every agent of the world is asked for: one rank is enough.
    Raises RuntimeError naming the operation whose answer was wrong, or what the client raised.
    All ranks of a host do this at once, so one key serves nearly all: each answer is a round trip.
    """
    every_byte = bytes(range(256))

    def expect(operation: str, got: object, wanted: object) -> None:
        if got != wanted:
            raise RuntimeError(f"{operation} gave {got!r:.60}, not {wanted!r:.60}")

    expect("check of a key that is not there", store.check([key]), False)
    store.set(key, b"40")
    expect("add", store.add(key, 2), 42)
    expect("compare_set", store.compare_set(key, "42", "4\0"), b"4\0")
    store.wait([key], PROBE_TIMEOUT)
    expect("get", store.get(key), b"4\0")
    if store.has_extended_api():
        store.append(key, "3")
        expect("multi_get after append", store.multi_get([key]), [b"4\x003"])
        store.multi_set([key], [every_byte])
        expect("get after multi_set", store.get(key), every_byte)
    if hasattr(store, "queue_push"):
        store.queue_push(f"{key}/queue", b"one")
        expect("queue_len", store.queue_len(f"{key}/queue"), 1)
        expect("queue_pop", store.queue_pop(f"{key}/queue"), b"one")
    expect("delete_key", store.delete_key(key), True)
    if whole and store.num_keys() < 0:
        raise RuntimeError("num_keys gave a negative number")
