"""Which way packets go: probes with chosen ports that die on the way, and who reports their death.

A packet with a TTL (hop limit) of k is dropped by the k-th router, which answers "time exceeded"
from the address on which the packet came in.  Switches hash addresses, protocol and ports, so the
probe takes the way of any other packet with the same five-tuple.  The answer comes back through the
socket's error queue (IP_RECVERR), which needs no privilege.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from commkit.errors import LaunchError, UsageError
from commkit.topology.ecmp import TCP, UDP, FiveTuple

#: Socket options that Python's socket module does not name.
_IP_RECVERR, _IPV6_RECVERR = 11, 25
_ORIGIN_ICMP, _ORIGIN_ICMP6 = 2, 3
#: (origin, ICMP type) of "time exceeded" and of "destination unreachable".
_EXPIRED = ((_ORIGIN_ICMP, 11), (_ORIGIN_ICMP6, 3))
_UNREACHABLE = ((_ORIGIN_ICMP, 3), (_ORIGIN_ICMP6, 1))
_LINGER_NOT = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Answer:
    """how: "hop" a router at this TTL, `by` its address; "arrived" at the destination; "silent"
    nobody answered in time; "busy" the source port is in use here; "unreachable" a router (`by`)
    or this host has no way there."""

    flow: FiveTuple
    ttl: int
    how: str
    by: str | None = None


def probe(
    flows: Sequence[FiveTuple],
    ttl: int,
    *,
    seconds: float = 0.5,
    tries: int = 3,
    window: int = 64,
) -> list[Answer]:
    """Send one packet of each flow from this host and network namespace; answers in their order.

    seconds, tries  routers limit the rate of such answers: silent flows are tried again, each time
                    for so long
    window          sockets at a time

    Protocols: UDP (a datagram of one byte, the TTL) and TCP (a SYN; if it arrives, the connection
    is reset).
    Raises UsageError for other protocols, a TTL outside 1 to 255, a source that is not here.
    """
    if not 1 <= ttl <= 255:
        raise UsageError(f"TTL {ttl}: expected 1 to 255")
    for flow in flows:
        if flow.protocol not in (TCP, UDP):
            raise UsageError(f"protocol {flow.protocol}: expected 6 (TCP) or 17 (UDP) for probes")
    found: dict[int, Answer] = {}
    for _ in range(tries):
        silent = [i for i in range(len(flows)) if i not in found or found[i].how == "silent"]
        for first in range(0, len(silent), window):
            some = silent[first : first + window]
            answers = _round([flows[i] for i in some], ttl, seconds)
            found.update(zip(some, answers, strict=True))
    return [found[i] for i in range(len(flows))]


def source_address(destination: str) -> str:
    """The address from which this host sends to a destination; LaunchError if there is no way."""
    family = _family(destination)
    with socket.socket(family, socket.SOCK_DGRAM) as one:
        try:
            one.connect((destination, 9))
        except OSError as error:
            raise LaunchError(f"{destination}: {error.strerror}") from None
        return str(one.getsockname()[0])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _round(flows: Sequence[FiveTuple], ttl: int, seconds: float) -> list[Answer]:
    """All at once, each on a socket of its own."""
    answers: list[Answer | None] = [None] * len(flows)
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        waiting: dict[int, tuple[int, socket.socket]] = {}
        for i, flow in enumerate(flows):
            one = stack.enter_context(_socket(flow))
            how = _send(one, flow, ttl)
            if how is not None:
                answers[i] = Answer(flow, ttl, how)
                continue
            # A TCP connection that comes about is writable; UDP always is.
            poll.register(one, select.POLLOUT if flow.protocol == TCP else 0)
            waiting[one.fileno()] = i, one
        deadline = time.monotonic() + seconds
        while waiting and (left := deadline - time.monotonic()) > 0:
            for fd, event in poll.poll(left * 1000):
                i, one = waiting[fd]
                answer = _read(one, flows[i], ttl)
                if answer is None and event & select.POLLOUT:
                    answer = _connected(one, flows[i], ttl)
                if answer is not None:
                    answers[i] = answer
                    poll.unregister(fd)
                    del waiting[fd]
    return [
        Answer(flow, ttl, "silent") if answer is None else answer
        for flow, answer in zip(flows, answers, strict=True)
    ]


def _socket(flow: FiveTuple) -> socket.socket:
    kind = socket.SOCK_STREAM if flow.protocol == TCP else socket.SOCK_DGRAM
    return socket.socket(_family(flow.source), kind | socket.SOCK_NONBLOCK)


def _send(one: socket.socket, flow: FiveTuple, ttl: int) -> str | None:
    """None: it is on its way."""
    if one.family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVERR, 1)
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, ttl)
    else:
        one.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        one.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, ttl)
    # A port serves several destinations at a time; those of connections that are over are free.
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if flow.protocol == TCP:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    try:
        one.bind((flow.source, flow.source_port))
        one.connect((flow.destination, flow.destination_port))
        if flow.protocol == UDP:
            # Routers quote it: a late answer to another TTL is told by it.
            one.send(bytes([ttl]))
            return None
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return "busy"
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"source {flow.source}: no address of this host") from None
        if error.errno == errno.ECONNREFUSED:
            return "arrived"
        if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EINVAL):
            return "unreachable"
        raise LaunchError(f"probe to {flow.destination}: {error.strerror}") from None
    return "arrived"


def _read(one: socket.socket, flow: FiveTuple, ttl: int) -> Answer | None:
    """What the error queue says."""
    while True:
        try:
            quoted, ancillary, _, _ = one.recvmsg(64, 512, socket.MSG_ERRQUEUE)
        except OSError:
            return None
        if flow.protocol == UDP and quoted[:1] not in (b"", bytes([ttl])):
            continue
        for level, kind, data in ancillary:
            if (level, kind) not in (
                (socket.IPPROTO_IP, _IP_RECVERR),
                (socket.IPPROTO_IPV6, _IPV6_RECVERR),
            ):
                continue
            # struct sock_extended_err, then the address of the node that the error came from.
            origin, what, code = struct.unpack_from("BBB", data, 4)
            by = _offender(data[16:])
            if (origin, what) in _EXPIRED:
                return Answer(flow, ttl, "hop", by)
            if (origin, what) in _UNREACHABLE:
                at_port = code == (3 if origin == _ORIGIN_ICMP else 4)
                if by is not None and (at_port or _same(by, flow.destination)):
                    return Answer(flow, ttl, "arrived", by)
                return Answer(flow, ttl, "unreachable", by)


def _offender(data: bytes) -> str | None:
    family = int.from_bytes(data[:2], "little") if len(data) >= 2 else 0
    if family == socket.AF_INET and len(data) >= 8:
        return str(ipaddress.IPv4Address(data[4:8]))
    if family == socket.AF_INET6 and len(data) >= 24:
        return str(ipaddress.IPv6Address(data[8:24]))
    return None


def _same(a: str, b: str) -> bool:
    return ipaddress.ip_address(a) == ipaddress.ip_address(b)


def _connected(one: socket.socket, flow: FiveTuple, ttl: int) -> Answer | None:
    """A TCP probe that is through, or was refused at the far end."""
    number = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number in (0, errno.ECONNREFUSED, errno.ECONNRESET):
        return Answer(flow, ttl, "arrived", flow.destination)
    return Answer(flow, ttl, "unreachable")


def stages(
    flows: Sequence[FiveTuple], *, most: int = 8, seconds: float = 0.5, tries: int = 3
) -> list[list[Answer]]:
    """Answers at TTL 1, 2, ... until ways part, no flow has got further, or after `most` hops."""
    found: list[list[Answer]] = []
    for ttl in range(1, most + 1):
        found.append(probe(flows, ttl, seconds=seconds, tries=tries))
        if spreading(found) or not any(answer.how == "hop" for answer in found[-1]):
            break
    return found


def spreading(found: Sequence[Sequence[Answer]]) -> int | None:
    """The first TTL at which flows of one source and destination are at different routers."""
    for answers in found:
        seen: dict[tuple[str, str], set[str]] = {}
        for answer in answers:
            if answer.how == "hop" and answer.by is not None:
                pair = answer.flow.source, answer.flow.destination
                seen.setdefault(pair, set()).add(answer.by)
        if any(len(some) > 1 for some in seen.values()):
            return answers[0].ttl
    return None
