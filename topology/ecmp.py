"""Which of several equal next hops a switch takes for a flow: hash models, and fitting them.

    Linux     the kernel's own hash when it forwards, exactly; needs its seed
    Chip      the families that switch chips offer, with seed and offset; which fields in which
              order a chip feeds them is the vendor's secret, so they are candidates for `fit`
    Probed    paths that were measured

A path is the index of the next hop in the switch's own order.
"""

from __future__ import annotations

import binascii
import functools
import ipaddress
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from commkit.errors import UsageError

TCP, UDP = 6, 17
#: Destination port of RoCEv2.
ROCE_PORT = 4791


@dataclass(frozen=True)
class FiveTuple:
    """Addresses as text, IPv4 or IPv6; protocol 6 is TCP, 17 UDP.  UsageError for a bad one."""

    source: str
    destination: str
    protocol: int
    source_port: int
    destination_port: int

    def __post_init__(self) -> None:
        for what, port in (("source", self.source_port), ("destination", self.destination_port)):
            if not 0 <= port <= 0xFFFF:
                raise UsageError(f"{what} port {port}: expected 0 to 65535")
        if not 0 <= self.protocol <= 0xFF:
            raise UsageError(f"protocol {self.protocol}: expected 0 to 255, 6 for TCP, 17 for UDP")
        if len(_packed(self.source)) != len(_packed(self.destination)):
            raise UsageError(
                f"{self.source} to {self.destination}: expected both IPv4 or both IPv6"
            )

    def with_source_port(self, port: int) -> FiveTuple:
        return FiveTuple(self.source, self.destination, self.protocol, port, self.destination_port)


@functools.lru_cache(maxsize=65536)
def _packed(address: str) -> bytes:
    try:
        return ipaddress.ip_address(address).packed
    except ValueError:
        raise UsageError(f"{address!r}: expected an IPv4 or IPv6 address") from None


class Hash(Protocol):
    """A model of one switch."""

    def path(self, flow: FiveTuple) -> int | None:
        """Index of the next hop; None where the model does not know."""


# --- Linux -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linux:
    """The kernel when it forwards (Linux 5.14 and later, little-endian).

    seed    net.ipv4.fib_multipath_hash_seed of the forwarding namespace (6.10 and later); without
            one the kernel's key is random and its paths have to be probed
    weights of the next hops, in the order of the route
    policy  fib_multipath_hash_policy: 1 (ports and addresses) or 3 with
            fib_multipath_hash_fields=55 (0x37), the same fields

    The flow key has zeros for all fields but protocol, ports and addresses; addresses and ports are
    each sorted, so that both directions hash alike.  It goes through SipHash-2-4 with the key
    seed:seed, seed:seed; policy 3 then folds in the hash of an inner header that is not there
    (jhash).  The upper 31 bits choose by cut points in proportion to the weights.

    Over veth and other devices that hand on the sender's packet hash policy 1 follows that hash, a
    random number of the socket: only policy 3 is a function of the packet there.
    """

    seed: int
    weights: tuple[int, ...]
    policy: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.seed < 1 << 32:
            raise UsageError(f"hash seed {self.seed}: expected 1 to 4294967295")
        if self.policy not in (1, 3):
            raise UsageError(f"hash policy {self.policy}: expected 1 or 3")
        if not self.weights or min(self.weights) < 1:
            raise UsageError(f"weights {self.weights}: expected one of 1 or more for each next hop")

    def hash(self, flow: FiveTuple) -> int:
        """The 31 bits that choose."""
        low, high = _packed(flow.source), _packed(flow.destination)
        if len(low) == 4:
            if int.from_bytes(high, "little") < int.from_bytes(low, "little"):
                low, high = high, low
        elif high < low:
            low, high = high, low
        a, b = struct.pack(">H", flow.source_port), struct.pack(">H", flow.destination_port)
        if int.from_bytes(b, "little") < int.from_bytes(a, "little"):
            a, b = b, a
        key = struct.pack("<HBx24x", 0, flow.protocol) + a + b + bytes(4) + low + high + bytes(4)
        secret = self.seed << 32 | self.seed
        value = (siphash24(key, secret, secret) & 0xFFFFFFFF) or 1
        if self.policy == 3:
            value = jhash_2words(value, 0, 0)
        return value >> 1

    def path(self, flow: FiveTuple) -> int:
        value = self.hash(flow)
        total = sum(self.weights)
        below = 0
        for index, weight in enumerate(self.weights):
            below += weight
            if value <= ((below << 31) + total // 2) // total - 1:
                return index
        return len(self.weights) - 1


_M32, _M64 = (1 << 32) - 1, (1 << 64) - 1


def siphash24(data: bytes, k0: int, k1: int) -> int:
    """SipHash-2-4 (Aumasson and Bernstein), 64 bits."""
    a, b = k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D
    c, d = k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573
    whole = len(data) & ~7
    words = list(struct.unpack(f"<{whole // 8}Q", data[:whole]))
    words.append((len(data) & 0xFF) << 56 | int.from_bytes(data[whole:], "little"))
    for index in range(len(words) + 1):
        last = index == len(words)
        word = 0 if last else words[index]
        if last:
            c ^= 0xFF
        d ^= word
        for _ in range(4 if last else 2):
            a = (a + b) & _M64
            b = (b << 13 | b >> 51) & _M64 ^ a
            a = (a << 32 | a >> 32) & _M64
            c = (c + d) & _M64
            d = (d << 16 | d >> 48) & _M64 ^ c
            a = (a + d) & _M64
            d = (d << 21 | d >> 43) & _M64 ^ a
            c = (c + b) & _M64
            b = (b << 17 | b >> 47) & _M64 ^ c
            c = (c << 32 | c >> 32) & _M64
        a ^= word
    return a ^ b ^ c ^ d


def jhash_2words(a: int, b: int, initial: int) -> int:
    """Jenkins' lookup3 over two words, as in the kernel's linux/jhash.h."""
    c = (initial + 0xDEADBEEF + 8) & _M32
    a, b = (a + c) & _M32, (b + c) & _M32

    def rotated(x: int, k: int) -> int:
        return (x << k | x >> (32 - k)) & _M32

    c = ((c ^ b) - rotated(b, 14)) & _M32
    a = ((a ^ c) - rotated(c, 11)) & _M32
    b = ((b ^ a) - rotated(a, 25)) & _M32
    c = ((c ^ b) - rotated(b, 16)) & _M32
    a = ((a ^ c) - rotated(c, 4)) & _M32
    b = ((b ^ a) - rotated(a, 14)) & _M32
    return ((c ^ b) - rotated(b, 24)) & _M32


# --- Switch chips ----------------------------------------------------------------------------


def _crc16(data: bytes, seed: int) -> int:
    """CRC-16/ARC: polynomial 0x8005, reflected."""
    value = seed & 0xFFFF
    for byte in data:
        value = value >> 8 ^ _CRC16[(value ^ byte) & 0xFF]
    return value


def _crc16_row(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0xA001 if value & 1 else 0)
    return value


_CRC16 = [_crc16_row(value) for value in range(256)]


def _xor16(data: bytes, seed: int) -> int:
    value = seed & 0xFFFF
    for (word,) in struct.iter_unpack(">H", data + bytes(len(data) % 2)):
        value ^= word
    return value


def _crc32(data: bytes, seed: int) -> int:
    return binascii.crc32(data, seed & _M32)


#: SAI's names of hash algorithms that are functions of the packet -> 16 or 32 bits of the key.
ALGORITHMS: Mapping[str, Callable[[bytes, int], int]] = {
    "crc": _crc16,
    "crc_ccitt": lambda data, seed: binascii.crc_hqx(data, seed & 0xFFFF),
    "crc_32lo": lambda data, seed: _crc32(data, seed) & 0xFFFF,
    "crc_32hi": lambda data, seed: _crc32(data, seed) >> 16,
    "xor": _xor16,
    "crc_xor": lambda data, seed: _crc16(data, seed) ^ _xor16(data, 0),
}


@dataclass(frozen=True)
class Chip:
    """A switch chip's hash: an algorithm over the five-tuple, rotated by `offset` bits, modulo.

    All of ALGORITHMS are linear over bits (RePaC, USENIX ATC 2021): where the number of next hops
    is a power of two, a change of the source port moves the path by an exclusive or that depends
    on the change alone; see `shift`.  UsageError for an algorithm that is not known.
    """

    algorithm: str
    paths: int
    seed: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise UsageError(f"hash algorithm {self.algorithm!r}: expected {', '.join(ALGORITHMS)}")
        if self.paths < 1 or not 0 <= self.offset < 16:
            raise UsageError(
                f"{self.paths} paths, offset {self.offset}: expected 1 or more, and 0 to 15"
            )

    def path(self, flow: FiveTuple) -> int:
        data = (
            _packed(flow.source)
            + _packed(flow.destination)
            + struct.pack(">HHH", flow.protocol, flow.source_port, flow.destination_port)
        )
        value = ALGORITHMS[self.algorithm](data, self.seed)
        rotated = (value >> self.offset | value << (16 - self.offset)) & 0xFFFF
        return rotated % self.paths

    def shift(self, flow: FiveTuple, change: int) -> int:
        """path ^ path with `change` in the source port: the same for every flow of one family of
        addresses, if `paths` is a power of two.  UsageError otherwise."""
        if self.paths & (self.paths - 1):
            raise UsageError(f"{self.paths} paths: shifts are constant for powers of two only")
        moved = flow.with_source_port(flow.source_port ^ change)
        return self.path(flow) ^ self.path(moved)


# --- Measured --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probed:
    """Measured paths; `shifts` (change of the source port -> exclusive or of the path), where the
    hash has turned out to be linear, extend them to ports that nobody measured."""

    paths: Mapping[FiveTuple, int]
    shifts: Mapping[int, int] = field(default_factory=dict)

    def path(self, flow: FiveTuple) -> int | None:
        known = self.paths.get(flow)
        if known is not None:
            return known
        for change, shift in self.shifts.items():
            near = self.paths.get(flow.with_source_port(flow.source_port ^ change))
            if near is not None:
                return near ^ shift
        return None


def linear_shifts(paths: Mapping[FiveTuple, int], least: int = 3) -> dict[int, int]:
    """Changes of the source port that moved every measured flow by the same exclusive or.

    A change counts if at least `least` pairs of flows show it; {} if any change is contradicted
    (the hash is then not linear, or the number of next hops no power of two).
    """
    by_rest: dict[tuple[str, str, int, int], list[tuple[int, int]]] = {}
    for flow, path in paths.items():
        rest = (flow.source, flow.destination, flow.protocol, flow.destination_port)
        by_rest.setdefault(rest, []).append((flow.source_port, path))
    seen: dict[int, list[int]] = {}
    for ports in by_rest.values():
        for i, (port, path) in enumerate(ports):
            for other, moved in ports[i + 1 :]:
                seen.setdefault(port ^ other, []).append(path ^ moved)
    if any(len(set(shifts)) > 1 for shifts in seen.values()):
        return {}
    return {change: shifts[0] for change, shifts in seen.items() if len(shifts) >= least}


def fit(measured: Mapping[FiveTuple, int], candidates: Iterable[Hash]) -> list[Hash]:
    """The candidates that explain every measurement, up to the numbering of the next hops.

    More than one may: measure more.  [] means that the hash is unknown.
    """
    return [model for model in candidates if _explains(model, measured)]


def _explains(model: Hash, measured: Mapping[FiveTuple, int]) -> bool:
    there: dict[int, int] = {}
    back: dict[int, int] = {}
    for flow, path in measured.items():
        said = model.path(flow)
        if said is None:
            return False
        if there.setdefault(said, path) != path or back.setdefault(path, said) != said:
            return False
    return True


def chips(
    paths: int, seeds: Sequence[int] = (0,), offsets: Sequence[int] = range(16)
) -> list[Hash]:
    """Candidates for `fit`."""
    return [
        Chip(algorithm, paths, seed, offset)
        for algorithm in ALGORITHMS
        for seed in seeds
        for offset in offsets
    ]


# --- RoCEv2 ----------------------------------------------------------------------------------


def flow_label(local: int, remote: int) -> int:
    """The 20 bits that Linux derives from two queue-pair numbers where no flow label is set."""
    label = local * remote
    label ^= label >> 20
    label ^= label >> 40
    return label & 0xFFFFF


def roce_source_port(local: int, remote: int, label: int = 0) -> int:
    """UDP source port of a connection's queue pair (rdma_get_udp_sport: mlx5, hns, irdma).

    NCCL leaves the flow label 0, so the queue-pair numbers decide.
    """
    label = label or flow_label(local, remote)
    return 0xC000 | ((label & 0x3FFF) ^ (label >> 14 & 0x3F))


def rxe_source_port(local: int) -> int:
    """The same for soft-RoCE (rxe), which looks at its own queue-pair number only."""
    return 0xC000 + (((local * 0x61C88647) & _M32) >> 18 & 0x3FFF)


def roce_flow(source: str, destination: str, local: int, remote: int) -> FiveTuple:
    """What a switch sees of a queue pair."""
    return FiveTuple(source, destination, UDP, roce_source_port(local, remote), ROCE_PORT)
