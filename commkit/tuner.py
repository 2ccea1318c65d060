"""NCCL's tuner table as the plugin reads it: its rows, which of them decides, and why.

The plugin (csrc/tuner, libnccl-tuner-commkit.so) is loaded here for the same code that runs inside
NCCL; docs/tune.md describes the table.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commkit.errors import OverlayError, UsageError

#: What NCCL_TUNER_PLUGIN has to name.
PLUGIN = Path(__file__).with_name("libnccl-tuner-commkit.so")

VERSION_LINE = "commkit-tuner-table 1"

COLLECTIVES = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")

_NO_LIMIT = 2**64 - 1
_ERROR_BYTES = 8192

#: From the first to below the second; None: without end.
Range = tuple[int, int | None]
ANY: Range = (0, None)


class TableError(UsageError):
    """A table that the plugin would not use: file, line, column and reason."""


@dataclass(frozen=True, slots=True)
class Row:
    """When it applies, and what is chosen then.

    `sizes` in bytes as NCCL counts them; `registered` None: whether buffers are or not;
    `algorithm` and `protocol` None: NCCL's own; `channels` and `chunk` (bytes) 0: NCCL's own.
    `line` and `shadowed_by` (the line of an earlier row that applies wherever this one does) are
    known of rows that were read.
    """

    collective: str
    sizes: Range
    algorithm: str | None = None
    protocol: str | None = None
    channels: int = 0
    chunk: int = 0
    nodes: Range = ANY
    ranks: Range = ANY
    per_node: Range = ANY
    registered: bool | None = None
    line: int = 0
    shadowed_by: int = 0

    def text(self) -> str:
        """The row's line in a table."""
        words = [self.collective, _range_text(self.sizes, _size_text)]
        for name in ("nodes", "ranks", "per_node"):
            if (value := getattr(self, name)) != ANY:
                words.append(f"{name}={_range_text(value, str)}")
        if self.registered is not None:
            words.append(f"registered={'yes' if self.registered else 'no'}")
        words.append("->")
        words += [self.algorithm, self.protocol or ""] if self.algorithm else ["default"]
        words += [f"channels={self.channels}"] if self.channels else []
        words += [f"chunk={_size_text(self.chunk)}"] if self.chunk else []
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Call:
    """A collective of one communicator, as the plugin is asked about it."""

    collective: str
    size: int
    ranks: int
    nodes: int
    registered: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    path: str
    rows: tuple[Row, ...]
    fingerprint: str


def read(path: str | Path) -> Table:
    """The table in a file.  Raises TableError with file, line, column and reason."""
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    fingerprint = ctypes.c_uint64()
    rows: ctypes.Array[_Row] = (_Row * 0)()
    while True:
        count = _plugin().commkit_tuner_rows(
            str(path).encode(), rows, len(rows), ctypes.byref(fingerprint), error, len(error)
        )
        if count < 0:
            raise TableError(error.value.decode(errors="replace"))
        if count <= len(rows):
            break
        rows = (_Row * count)()
    found = tuple(_row(rows[index]) for index in range(count))
    return Table(str(path), found, f"{fingerprint.value:016x}")


def decides(table: Table, call: Call) -> Row | None:
    """The row that the plugin uses for `call`; None: NCCL chooses.

    Raises TableError if the file is not what it was, and UsageError for a call that cannot be.
    """
    _check(call)
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    place = _plugin().commkit_tuner_find(
        table.path.encode(),
        COLLECTIVES.index(call.collective),
        call.size,
        call.ranks,
        call.nodes,
        int(call.registered),
        error,
        len(error),
    )
    if place < -1:
        raise TableError(error.value.decode(errors="replace"))
    if place >= len(table.rows):
        raise TableError(f"{table.path} has changed since it was read; start again")
    return None if place < 0 else table.rows[place]


def why_not(row: Row, call: Call) -> str:
    """What keeps `row` from applying to `call`; "": nothing."""
    if row.collective != call.collective:
        return f"is for {row.collective}"
    if not _within(row.sizes, call.size):
        return f"is for {_range_text(row.sizes, _size_text)} bytes"
    for name, value in (("nodes", call.nodes), ("ranks", call.ranks)):
        if not _within(getattr(row, name), value):
            return f"is for {name}={_range_text(getattr(row, name), str)}"
    if row.per_node != ANY:
        if call.ranks % call.nodes:
            return "needs nodes of equally many ranks"
        if not _within(row.per_node, call.ranks // call.nodes):
            return f"is for per_node={_range_text(row.per_node, str)}"
    if row.registered is not None and row.registered != call.registered:
        return f"is for {'' if row.registered else 'un'}registered buffers"
    return ""


def text(rows: Sequence[Row], comment: str = "") -> str:
    """A table's file; each line of `comment` stands at its top.  What is read back is equal."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    return "\n".join([*lines, VERSION_LINE, *(row.text() for row in rows)]) + "\n"


def size(words: str) -> int:
    """Bytes of 65536, 64K, 8M, 1G or 2T (of 1,024).  Raises UsageError."""
    digits, suffix = words.rstrip("KMGTkmgt"), words[len(words.rstrip("KMGTkmgt")) :]
    if not (digits.isascii() and digits.isdigit()) or len(suffix) > 1:
        raise UsageError(f"size {words!r}: expected bytes such as 65536, 64K, 8M or 1G")
    return int(digits) << (10 * ("KMGT".index(suffix.upper()) + 1) if suffix else 0)


def _check(call: Call) -> None:
    if call.collective not in COLLECTIVES:
        raise UsageError(
            f"collective {call.collective!r}: NCCL's tuners choose for {', '.join(COLLECTIVES)}"
        )
    if not 1 <= call.nodes <= call.ranks < 2**31:
        raise UsageError(f"{call.ranks} ranks on {call.nodes} nodes: expected 1 <= nodes <= ranks")
    if not 0 <= call.size < 2**63:
        raise UsageError(f"a size of {call.size} bytes: expected 0 or more, below 2^63")


def _within(bounds: Range, value: int) -> bool:
    return bounds[0] <= value and (bounds[1] is None or value < bounds[1])


def _range_text(bounds: Range, show: object) -> str:
    assert callable(show)
    first, end = bounds
    if end is None:
        return f"{show(first)}.."
    return str(show(first)) if end == first + 1 else f"{show(first)}..{show(end)}"


def _size_text(value: int) -> str:
    for shift, suffix in ((40, "T"), (30, "G"), (20, "M"), (10, "K")):
        if value and value % (1 << shift) == 0:
            return f"{value >> shift}{suffix}"
    return str(value)


class _Range(ctypes.Structure):
    _fields_ = (("first", ctypes.c_uint64), ("end", ctypes.c_uint64))

    def value(self) -> Range:
        return (self.first, None if self.end == _NO_LIMIT else self.end)


class _Row(ctypes.Structure):
    """tuner_row of csrc/tuner/table.h."""

    _fields_ = (
        ("line", ctypes.c_int32),
        ("shadowed_by", ctypes.c_int32),
        ("collective", ctypes.c_int32),
        ("registered", ctypes.c_int32),
        ("algorithm", ctypes.c_int32),
        ("protocol", ctypes.c_int32),
        ("channels", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("chunk", ctypes.c_uint64),
        ("sizes", _Range),
        ("nodes", _Range),
        ("ranks", _Range),
        ("per_node", _Range),
    )


def _row(row: _Row) -> Row:
    return Row(
        collective=COLLECTIVES[row.collective],
        sizes=row.sizes.value(),
        algorithm=ALGORITHMS[row.algorithm] if row.algorithm >= 0 else None,
        protocol=PROTOCOLS[row.protocol] if row.protocol >= 0 else None,
        channels=row.channels,
        chunk=row.chunk,
        nodes=row.nodes.value(),
        ranks=row.ranks.value(),
        per_node=row.per_node.value(),
        registered=None if row.registered < 0 else bool(row.registered),
        line=row.line,
        shadowed_by=row.shadowed_by,
    )


@functools.cache
def _plugin() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(PLUGIN))
    except OSError as error:
        raise OverlayError(
            f"{PLUGIN} cannot be loaded ({error}): build it (pip install ., or make native)"
        ) from None
    library.commkit_tuner_rows.restype = ctypes.c_int64
    library.commkit_tuner_rows.argtypes = [
        ctypes.c_char_p,
        ctypes.POINTER(_Row),
        ctypes.c_int64,
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.c_char_p,
        ctypes.c_size_t,
    ]
    library.commkit_tuner_find.restype = ctypes.c_int64
    library.commkit_tuner_find.argtypes = [
        ctypes.c_char_p,
        ctypes.c_int,
        *[ctypes.c_uint64] * 3,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_size_t,
    ]
    return library
