"""Hosts and ports as people and launchers write them; and ports that a job can agree on unasked.

IPv6 is the reason for this file: a literal has colons of its own, so a port can only follow it
in brackets.  What commkit prints is bracketed for IPv6 and never otherwise.
"""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

from commkit.errors import CommkitError, UsageError

#: The kernel's default ephemeral range (net/ipv4/tcp_ipv4.c).  Always avoided, because the host
#: that runs the root may have kept it even where this one was tuned.
DEFAULT_EPHEMERAL = (32768, 60999)
EPHEMERAL_FILE = "/proc/sys/net/ipv4/ip_local_port_range"

_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_PORT = re.compile(r"[0-9]{1,5}")
_DOTTED = re.compile(r"[0-9.]+")
_SCOPE = re.compile(r"[^\s/%\[\]]{1,15}")  # an interface name or its index


@dataclass(frozen=True, slots=True)
class Endpoint:
    """host: a name or a numeric address without brackets; port 0: none was given."""

    host: str
    port: int = 0
    scope: str = ""  # the interface of a link-local IPv6 address
    path: str = ""  # what follows the first '/', without it

    @property
    def address(self) -> str:
        """What a resolver takes: never bracketed, with the scope."""
        return f"{self.host}%{self.scope}" if self.scope else self.host

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.host else self.address
        return (
            host + (f":{self.port}" if self.port else "") + (f"/{self.path}" if self.path else "")
        )


def parse_port(
    text: str, name: str = "port", error: Callable[[str], CommkitError] = UsageError
) -> int:
    """1 to 65535, or an error that names `name`."""
    if not _PORT.fullmatch(text.strip()) or not 1 <= int(text) <= 65535:
        raise error(f"{name}={text!r}: expected a port, 1-65535; correct or unset it")
    return int(text)


def parse_host(
    text: str, name: str = "host", error: Callable[[str], CommkitError] = UsageError
) -> Endpoint:
    """A host alone, as MASTER_ADDR holds it: IPv6 with or without brackets, `%scope` allowed."""
    found = parse_address(text, name, error)
    if found.port:
        raise error(
            f"{name}={text!r}: expected a host without a port; "
            f"write {found.address!r} and give the port on its own"
        )
    return found


def parse_address(
    text: str, name: str = "address", error: Callable[[str], CommkitError] = UsageError
) -> Endpoint:
    """host, host:port, IPv6, [IPv6], [IPv6]:port; IPv6:port without brackets is refused."""
    return _parse(text.strip(), text, name, error)


def parse_endpoint(
    text: str, name: str = "endpoint", error: Callable[[str], CommkitError] = UsageError
) -> Endpoint:
    """host:port[/path].  The path is cut first, then the port at the last colon.

    Since a port must be there, an IPv6 literal may come without brackets.
    """
    where, _, path = text.strip().partition("/")
    host, colon, port = where.rpartition(":")
    if not colon or host.endswith(":"):
        raise error(f"{name}={text!r}: expected host:port[/path]; the port is missing")
    found = _parse(host, text, name, error)
    if found.port:
        raise error(f"{name}={text!r}: expected host:port[/path], not two ports")
    return Endpoint(
        found.host, parse_port(port, f"{name}={text!r}: port", error), found.scope, path
    )


def _parse(text: str, whole: str, name: str, error: Callable[[str], CommkitError]) -> Endpoint:
    def bad(expected: str) -> CommkitError:
        return error(f"{name}={whole!r}: expected {expected}")

    if text.startswith("["):
        inside, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise bad("[IPv6] or [IPv6]:port")
        address, _, scope = inside.replace("%25", "%").partition("%")
        if not _is_ipv6(address) or (scope and not _SCOPE.fullmatch(scope)):
            raise bad("an IPv6 address between the brackets")
        number = parse_port(rest[1:], f"{name}={whole!r}: port", error) if rest else 0
        return Endpoint(address, number, scope)
    if _is_ipv4(text):
        return Endpoint(text)
    address, percent, scope = text.partition("%")
    if _is_ipv6(address):
        if percent and not _SCOPE.fullmatch(scope):
            raise bad("an interface name after the '%'")
        return Endpoint(address, 0, scope)
    if text.count(":") > 1:
        raise bad("an IPv6 address; with a port it needs brackets: [IPv6]:port")
    host, colon, port = text.partition(":")
    if not _NAME.fullmatch(host):
        raise bad("a host name or an IP address")
    if _DOTTED.fullmatch(host) and not _is_ipv4(host):
        raise bad("four numbers from 0 to 255 in an IPv4 address")
    return Endpoint(host, parse_port(port, f"{name}={whole!r}: port", error) if colon else 0)


def _is_ipv6(text: str) -> bool:
    return _is_numeric(socket.AF_INET6, text)


def _is_ipv4(text: str) -> bool:
    return _is_numeric(socket.AF_INET, text)


def _is_numeric(family: int, text: str) -> bool:
    try:
        socket.inet_pton(family, text)
    except (OSError, ValueError):  # ValueError: a zero byte within
        return False
    return True


def ephemeral_range(file: str = EPHEMERAL_FILE) -> tuple[int, int]:
    """The ports that this kernel gives to outgoing connections; its default if unreadable."""
    try:
        with open(file) as stream:
            low, high = (int(word) for word in stream.read().split())
    except (OSError, ValueError):
        return DEFAULT_EPHEMERAL
    return low, high


def derived_ports(key: str, count: int, ephemeral: tuple[int, int]) -> tuple[int, ...]:
    """`count` distinct ports from 10000 up that every process with the same key derives alike.

    The hash decides the order, the ephemeral ranges only leave ports out: hosts that are tuned
    differently still share most of the sequence.  Fewer ports (perhaps none) come back where the
    ephemeral range covers nearly everything.
    """
    ports: list[int] = []
    for draw in range(4096):
        digest = hashlib.sha256(f"{key}/{draw}".encode()).digest()
        port = 10000 + int.from_bytes(digest[:8], "big") % (65536 - 10000)
        avoided = any(low <= port <= high for low, high in (ephemeral, DEFAULT_EPHEMERAL))
        if not avoided and port not in ports:
            ports.append(port)
            if len(ports) == count:
                break
    return tuple(ports)
