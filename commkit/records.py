"""One measurement, one line of JSON: what everything that measures writes and every report reads.

A file of records is JSON lines: it can be appended to, cut, concatenated and read while it
grows.  Each line stands alone: it repeats the run's versions and settings.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from commkit.errors import UsageError

#: Raised when a field changes its meaning, is removed or is added.
SCHEMA = 2

#: The oldest version that is read.  What a version added has a default, which says what the
#: records before it mean.  2 added everything from `mode` on.
OLDEST = 1

#: Environment variables worth keeping beside a number.  An allow-list, because environments
#: hold tokens; a listed prefix still loses names that look like one.
_KEPT_NAMES = frozenset(
    {
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
        "COMMKIT_DISABLE",
        "COMMKIT_HOST_ID",
        "COMMKIT_IFNAME",
        "COMMKIT_STORE",
    }
)
_KEPT_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TP_SOCKET_", "UCX_", "FI_", "RCCL_")
_SECRET = re.compile(r"SECRET|TOKEN|PASS|CRED|AUTH|(?<!P)KEY", re.IGNORECASE)  # a PKEY is none
_LOGIN = re.compile(r"(?<=://)[^\s,;]+(?=@)")  # user:password, which may hold / and @


def kept_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change a measurement, by allow-list; nothing that names a secret."""
    return {
        name: _LOGIN.sub("***", value)
        for name, value in sorted(environ.items())
        if (name in _KEPT_NAMES or name.startswith(_KEPT_PREFIXES)) and not _SECRET.search(name)
    }


@dataclass(frozen=True, slots=True)
class WrongElement:
    """The first wrong element: of the lowest rank that saw one, at its lowest index."""

    rank: int
    index: int
    got: float | str  # 'nan', 'inf' and '-inf' are text, since JSON has no such numbers
    expected: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One collective at one size, measured over all ranks.

    Times are microseconds, bandwidths 1e9 bytes a second, sizes bytes.
    """

    # what ran
    collective: str
    dtype: str  # nccl-tests' names: float, bfloat16, f8e4m3, ...
    redop: str  # sum, prod, min, max, avg; none where nothing is reduced
    root: int  # -1 where there is none
    in_place: bool
    bytes: int  # what was moved, not what was asked for
    count: int  # elements
    # where
    world_size: int
    hosts: int
    backend: str
    device: str
    start: str  # who made the process group: commkit or torch
    # how
    iterations: int
    warmup_iterations: int
    clock: str  # monotonic or cuda-events
    # what came out; each of times_us is one iteration's maximum over the ranks
    times_us: tuple[float, ...]
    time_us: float  # what time_is says; of commkit's own runs the median of times_us
    min_us: float | None  # these six and slowest_rank_time_us are None where a file of another
    mean_us: float | None  # tool does not tell them
    p95_us: float | None
    p99_us: float | None
    max_us: float | None
    cv: float | None  # standard deviation / mean
    slowest_rank: int  # the rank whose own median is largest; -1: not known
    slowest_rank_time_us: float | None
    algbw_gbps: float
    busbw_gbps: float | None  # None: not defined for one rank
    wrong: int | None  # wrong elements over all ranks; None: not verified
    first_wrong: WrongElement | None
    # when and with what
    run: str  # one identifier for all records of a run
    timestamp: float  # seconds since 1970 (UTC)
    versions: dict[str, str]
    environment: dict[str, str]
    schema: int = SCHEMA
    # how calls were made: blocking, async (waited for one by one), coalesced, graph
    mode: str = "blocking"
    aggregated: int = 1  # calls a timed iteration; every time is that of one call
    # the ranks that communicate: world_size is one group's, and all groups run at once
    group: str = ""  # family, or rule that split the world; empty: the whole world
    groups: int = 1
    concurrent: str = ""  # what ran at once, family:collective joined by '+'; empty: alone
    source: int = -1  # of a pair of ranks; -1: not about a pair
    peer: int = -1
    # more of what came out
    rank_times_us: tuple[float, ...] = ()  # each rank's median, by rank of the job
    skew: float = 0.0  # (largest - smallest of the ranks' medians) / their median
    precision: float | None = None  # half the 95 % interval of time_us, over time_us
    inter_host_gbps: float | None = None  # a rank's bytes that leave its host, over time
    link_percent: float | None = None  # busbw in percent of the link speed that was given
    # who measured
    tool: str = "commkit"  # or nccl-tests, osu, imb: read from its file
    time_is: str = "median"  # median, mean, or slowest-mean: the slowest rank's mean


def to_line(record: Measurement) -> str:
    """One line of JSON without the newline.

    Raises ValueError for a number that JSON cannot hold (nan, infinity).
    """
    values = {item.name: getattr(record, item.name) for item in fields(record)}
    if record.first_wrong is not None:
        values["first_wrong"] = {
            item.name: getattr(record.first_wrong, item.name) for item in fields(WrongElement)
        }
    return json.dumps(values, allow_nan=False, separators=(",", ":"))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    # json.loads accepts NaN and Infinity, which are not JSON.
    return (isinstance(value, float) and math.isfinite(value)) or _is_int(value)


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", lambda value: isinstance(value, str)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("an integer", _is_int),
    "float": ("a number", _is_number),
    "int | None": ("an integer or null", lambda value: value is None or _is_int(value)),
    "float | None": ("a number or null", lambda value: value is None or _is_number(value)),
    "float | str": ("a number or text", lambda value: _is_number(value) or isinstance(value, str)),
    "tuple[float, ...]": (
        "a list of numbers",
        lambda value: isinstance(value, list) and all(map(_is_number, value)),
    ),
    "dict[str, str]": ("an object of text", _is_text_map),
    "WrongElement | None": (
        "an object or null",
        lambda value: value is None or isinstance(value, dict),
    ),
}


def _checked(kind: type, values: Any, what: str) -> dict[str, Any]:
    """`values` if it has the fields of the dataclass `kind` and no others, each of its type."""
    if not isinstance(values, dict):
        raise ValueError(f"{what}: expected a JSON object, got {type(values).__name__}")
    wanted = {item.name: str(item.type) for item in fields(kind)}
    optional = {item.name for item in fields(kind) if item.default is not MISSING}
    for name in values.keys() - wanted.keys():
        raise ValueError(f"{what}: unknown field {name!r}")
    for name, type_name in wanted.items():
        if name not in values:
            if name in optional:
                continue
            raise ValueError(f"{what}: field {name!r} is missing")
        expected, check = _CHECKS[type_name]
        if not check(values[name]):
            raise ValueError(f"{what}: field {name!r} is {values[name]!r}: expected {expected}")
    return dict(values)


def from_line(line: str) -> Measurement:
    """The record of one line.  Raises ValueError saying which field is wrong and how."""
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at column {error.colno}: {error.msg}") from None
    # The version comes first: a later version's fields would otherwise look like mistakes.
    if isinstance(values, dict):
        version = values.get("schema", SCHEMA)
        if not _is_int(version) or not OLDEST <= version <= SCHEMA:
            raise ValueError(
                f"field 'schema' is {version!r}: this commkit reads {OLDEST} to {SCHEMA}; "
                "use the version that wrote the file"
            )
    values = _checked(Measurement, values, "record")
    for name in ("times_us", "rank_times_us"):
        values[name] = tuple(values.get(name, ()))
    if values["first_wrong"] is not None:
        wrong = _checked(WrongElement, values["first_wrong"], "first_wrong")
        values["first_wrong"] = WrongElement(**wrong)
    return Measurement(**values)


def read(path: str | os.PathLike[str]) -> Iterator[Measurement]:
    """The records of a file, in order; empty lines are skipped.

    Raises UsageError naming file, line and field for a line that is not a record.
    """
    name = os.fspath(path)
    try:
        stream = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}; expected a file of records") from error
    with stream:
        for number, line in enumerate(stream, 1):
            try:
                text = line.decode()
                record = from_line(text) if text.strip() else None
            except UnicodeDecodeError:
                raise UsageError(f"{name}:{number}: not UTF-8 text") from None
            except ValueError as error:
                raise UsageError(f"{name}:{number}: {error}") from None
            if record is not None:
                yield record


class Writer:
    """Appends records to a file, or writes them to standard output ('-').

    Each record is with the system before `write` returns, so an interrupted run keeps what it
    measured.  Raises UsageError if the file cannot be opened or another process is writing to
    it: two worlds that should have been one would otherwise mix their results unnoticed.
    """

    def __init__(self, path: str) -> None:
        self._file: io.FileIO | None = None
        if path == "-":
            return
        try:
            # Unbuffered: a buffer that a full disk refused would be tried again when closed.
            self._file = io.FileIO(path, "a")
        except OSError as error:
            raise UsageError(f"--json {path}: {error.strerror}; name a writable file") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UsageError(
                f"--json {path}: another process is writing records to this file; "
                "are these ranks of one world that started as several?"
            ) from None
        except OSError:
            pass  # a file system without locks: two worlds in one file are not noticed there

    def write(self, record: Measurement) -> None:
        """Raises OSError where the system does, a full disk for one."""
        line = to_line(record) + "\n"
        if self._file is None:
            sys.stdout.write(line)
            sys.stdout.flush()
            return
        left = memoryview(line.encode())
        whole = os.fstat(self._file.fileno()).st_size
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            # No torn line, which the next run would append to; a pipe cannot be cut.
            with contextlib.suppress(OSError):
                self._file.truncate(whole)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
