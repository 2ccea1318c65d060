"""Before a group is made: which host cannot reach which, and in what the ranks differ.

Only the agent tree is needed, which connects each host to one other; a communication library
connects many, and says little when it cannot.  One rank of each host listens, the others' connect.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commkit import overlay, records
from commkit.errors import EXIT_LAUNCH, EXIT_OK
from commkit.launch import LaunchSpec
from commkit.ranks import runs
from commkit.version import VERSION

#: Seconds for one connection, and how many a host opens at a time.
CONNECT = 3.0
_AT_ONCE = 64
#: Up to so many hosts all pairs are tried, beyond each host tries those 1, 2, 4, ... away.
ALL_PAIRS = 256
_JOIN = 120.0
_SIOCGIFADDR = 0x8915
_TOKEN = b"commkit preflight\n"


@dataclass(frozen=True, slots=True)
class Card:
    """What one rank tells the others."""

    host: int
    hostname: str
    address: str  # of the rank that listens; "" for the other ranks of a host
    port: int
    versions: dict[str, str]
    environment: dict[str, str]


def run(spec: LaunchSpec, *, timeout: float = _JOIN) -> int:
    """Collective over the world that `spec` describes; the exit code, 3 if a host is cut off.

    Rank 0 prints.  Raises what overlay.join raises, naming ranks that did not come.
    """
    world = overlay.join(spec, timeout)
    try:
        lines, code = examine(world)
    finally:
        world.leave()
    if spec.rank == 0:
        print("\n".join(lines), flush=True)
    return code


def examine(world: overlay.World) -> tuple[list[str], int]:
    """What `run` prints, the same on every rank, and the exit code."""
    me = world.identity
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        address, port = "", 0
        if me.local_rank == 0 and me.hosts > 1:
            listener = stack.enter_context(_listen(me.interface))
            address, port = listener.getsockname()[:2]
            threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        card = Card(
            me.host_index,
            socket.gethostname(),
            address,
            port,
            {"commkit": VERSION, "python": platform.python_version(), **_torch_version()},
            records.kept_environment(os.environ),
        )
        cards = _exchange(world, card)
        listeners = {one.host: (one, rank) for rank, one in enumerate(cards) if one.port}
        failures: list[tuple[int, str]] = []
        if port:
            wanted = [listeners[h][0] for h in targets(me.host_index, sorted(listeners))]
            with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(wanted)))) as pool:
                tried = pool.map(_connect, wanted)
                failures = [(one.host, why) for one, why in zip(wanted, tried, strict=True) if why]
        texts = world.all_gather(json.dumps(failures).encode(), tag="preflight-failures")
        everyone = [json.loads(text) for text in texts]  # a listener closes after all have tried
    return report(cards, everyone, time.monotonic() - began)


def _exchange(world: overlay.World, card: Card) -> list[Card]:
    mine = json.dumps({name: getattr(card, name) for name in Card.__slots__})
    return [Card(**json.loads(text)) for text in world.all_gather(mine.encode(), tag="preflight")]


def targets(host: int, hosts: Sequence[int]) -> list[int]:
    """The hosts that `host` tries to reach: all others, or those 1, 2, 4, ... further on."""
    n, at = len(hosts), hosts.index(host)
    if n <= ALL_PAIRS:
        return [other for other in hosts if other != host]
    steps = (1 << k for k in range((n - 1).bit_length()))
    return sorted({hosts[(at + step) % n] for step in steps if step < n} - {host})


def report(
    cards: Sequence[Card], failures: Sequence[Sequence[Sequence[Any]]], seconds: float
) -> tuple[list[str], int]:
    """Lines and exit code, from every rank's card and what it could not reach."""
    ranks: dict[int, list[int]] = {}
    for rank, card in enumerate(cards):
        ranks.setdefault(card.host, []).append(rank)
    names = {card.host: card.hostname for card in cards}

    def shown(host: int) -> str:
        plural = "s" if len(ranks[host]) > 1 else ""
        return f"{names[host]} (rank{plural} {runs(ranks[host])})"

    lines = [f"# preflight: {len(cards)} ranks on {len(ranks)} hosts joined the agent tree"]
    lines += differences(cards)
    where = {card.host: f"{card.address}:{card.port}" for card in cards if card.port}
    bad = [
        f"commkit: {shown(cards[rank].host)} cannot reach {shown(host)} at {where[host]}: {why}"
        for rank, mine in enumerate(failures)
        for host, why in mine
    ]
    if len(ranks) == 1:
        lines.append("# one host: no network to try")
    elif not bad:
        how = (
            "every host reaches every other"
            if len(ranks) <= ALL_PAIRS
            else (
                "every host reaches those 1, 2, 4, ... hosts further on; other pairs were not tried"
            )
        )
        lines.append(f"# {how} ({seconds:.1f} s)")
    return lines + bad, EXIT_LAUNCH if bad else EXIT_OK


def differences(cards: Sequence[Card]) -> list[str]:
    """Versions and variables in which a rank differs from rank 0: the first rank of each."""
    lines: dict[str, str] = {}
    for kind in ("versions", "environment"):
        first: dict[str, str] = getattr(cards[0], kind)
        for rank, card in enumerate(cards):
            own: dict[str, str] = getattr(card, kind)
            for name in sorted(first.keys() | own.keys()):
                a, b = first.get(name, "unset"), own.get(name, "unset")
                if (
                    a != b
                    and name not in lines
                    and not name.endswith(("_VISIBLE_DEVICES", "_HOST_ID"))
                ):
                    lines[name] = f"# warning: {name} is {a} on rank 0, {b} on rank {rank}"
    return list(lines.values())


def _torch_version() -> dict[str, str]:
    # Without importing it: that takes seconds.
    from importlib import metadata

    try:
        return {"torch": metadata.version("torch")}
    except metadata.PackageNotFoundError:
        return {}


def _listen(interface: str) -> socket.socket:
    address = interface_address(interface)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def interface_address(interface: str) -> str:
    """An address of a network interface: IPv4's, else a global IPv6 one, else its own name's."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        request = struct.pack("256s", interface[:15].encode())
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        return socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope == "00":
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return socket.gethostbyname(socket.gethostname())


def _serve(listener: socket.socket) -> None:
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return  # closed: everybody has tried
        with peer, contextlib.suppress(OSError):
            peer.settimeout(CONNECT)
            peer.sendall(_TOKEN)


def _connect(card: Card) -> str:
    """'' if the listener there answers, else why not."""
    try:
        with socket.create_connection((card.address, card.port), CONNECT) as peer:
            peer.settimeout(CONNECT)
            data = b""
            while len(data) < len(_TOKEN) and (piece := peer.recv(64)):
                data += piece
    except TimeoutError:
        return f"no answer in {CONNECT:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return "" if data == _TOKEN else "something else answers there"
