"""Slurm's compressed notations: host lists `gpu[08-11,20]-ib0` and task counts `4(x2),1`.

The order is Slurm's own: names as listed, nothing sorted, nothing deduplicated (n00 and n0 are two
hosts).  In one name the last bracket varies fastest, then the first, then the second, and so on:
a curiosity from three brackets on, but ranks are numbered by it.  Padding follows the low bound of
each range.  Commas and blanks outside brackets separate names.  A suffix after the last bracket
is accepted, as newer Slurm does.
Checked against `scontrol show hostnames` of Slurm 22.05 (tests/recorded/scontrol.json).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from commkit.errors import UsageError

#: Slurm's own limit for one range.
MAX_RANGE = 65536
#: A product of brackets can be larger than any cluster: refuse it before it eats the memory.
MAX_HOSTS = 1 << 20

_SEPARATORS = ", \t\n"
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_PLAIN = re.compile(r"[^\s,\[\]]+")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})", re.DOTALL)
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand(text: str) -> list[str]:
    """Host names of a Slurm host list, in Slurm's order.

    Raises UsageError, quoting the list and the offending part, for anything that Slurm would not
    print: unbalanced brackets, an empty or descending range, a stride, blanks inside brackets,
    more than 65,536 hosts in one range.
    """
    if not text:
        raise UsageError("the host list is empty: expected something like n[1-4]")
    hosts: list[str] = []
    for item in _split(text):
        pieces = _pieces(item, text)
        size = len(hosts)
        factor = 1
        for piece in pieces:
            factor *= len(piece)
        if size + factor > MAX_HOSTS:
            raise _bad(text, item, f"at most {MAX_HOSTS} hosts")
        # Outermost loop first.  Plain text (even places) is a choice of one: it may loop anywhere.
        order = [*reversed(range(len(pieces) - 2)), *range(len(pieces))[-2:]]
        for chosen in itertools.product(*(pieces[i] for i in order)):
            parts = dict(zip(order, chosen, strict=True))
            hosts.append("".join(parts[i] for i in range(len(pieces))))
    if not hosts:
        raise _bad(text, text, "a host name")
    return hosts


def compress(names: Sequence[str]) -> str:
    """The host list of `names` in their order: expand(compress(names)) == names.

    Only the last number of a name is folded, and only at its end, so that every Slurm reads it.
    Raises UsageError for no names, and for a name that a host list cannot hold.
    """
    if not names:
        raise UsageError("no hosts to list: expected at least one")
    #: (prefix, runs of (first number as written, last number))
    groups: list[tuple[str, list[tuple[str, int]]]] = []
    for name in names:
        if not name or not _PLAIN.fullmatch(name):
            raise UsageError(
                f"host name {name!r} in a host list: expected no blank, comma, bracket"
            )
        match = _NUMBERED.fullmatch(name)
        if match is None:
            groups.append((name, []))
            continue
        prefix, number = match.groups()
        if not groups or groups[-1][0] != prefix or not groups[-1][1]:
            groups.append((prefix, [(number, int(number))]))
            continue
        runs = groups[-1][1]
        low, high = runs[-1]
        if number == f"{high + 1:0{len(low)}d}" and high + 1 - int(low) < MAX_RANGE:
            runs[-1] = low, high + 1
        else:
            runs.append((number, int(number)))
    return ",".join(prefix + _bracket(runs) for prefix, runs in groups)


def _bracket(runs: list[tuple[str, int]]) -> str:
    if not runs:
        return ""
    parts = [low if int(low) == high else f"{low}-{high:0{len(low)}d}" for low, high in runs]
    return parts[0] if len(parts) == 1 and "-" not in parts[0] else f"[{','.join(parts)}]"


def expand_counts(text: str) -> list[int]:
    """`2(x3),1` -> [2, 2, 2, 1]: tasks on each host, in the order of the host list."""
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if not match:
            raise UsageError(
                f"{text!r}: {item!r} is not a run of task counts: expected N or N(xREPEAT), "
                "as in 4(x2),1"
            )
        repeat = int(match[2] or 1)
        if len(counts) + repeat > MAX_HOSTS:
            raise UsageError(f"{text!r}: {item!r} repeats too often: at most {MAX_HOSTS} hosts")
        counts.extend([int(match[1])] * repeat)
    return counts


def _bad(text: str, part: str, expected: str) -> UsageError:
    shown, part = (t if len(t) <= 200 else f"{t[:160]}...{t[-30:]}" for t in (text, part))
    return UsageError(f"host list {shown!r}: {part!r}: expected {expected}")


def _split(text: str) -> list[str]:
    """Cut at the commas and blanks outside brackets."""
    items: list[str] = []
    start = 0
    opened = -1
    for index, char in enumerate(text):
        if char == "[":
            if opened >= 0:
                raise _bad(text, text[opened : index + 1], "no bracket inside a bracket")
            opened = index
        elif char == "]":
            if opened < 0:
                raise _bad(text, text[start : index + 1], "a '[' before the ']'")
            opened = -1
        elif opened < 0 and char in _SEPARATORS:
            items.append(text[start:index])
            start = index + 1
        elif char.isspace():
            raise _bad(text, text[start : index + 1], "no blanks")
    if opened >= 0:
        raise _bad(text, text[opened:], "a ']' after the '['")
    items.append(text[start:])
    return [item for item in items if item]  # Slurm overlooks a stray comma


def _pieces(item: str, text: str) -> list[list[str]]:
    """`rack[1-2]n` -> [["rack"], ["1", "2"], ["n"]]: text at even places, brackets at odd ones."""
    pieces: list[list[str]] = []
    for index, part in enumerate(re.split(r"\[([^\]]*)\]", item)):
        if index % 2:
            pieces.append([number for r in part.split(",") for number in _numbers(r, part, text)])
        else:
            pieces.append([part])
    return pieces


def _numbers(token: str, bracket: str, text: str) -> list[str]:
    match = _RANGE.fullmatch(token)
    if not match:
        raise _bad(text, token or f"[{bracket}]", "NUMBER or LOW-HIGH between the brackets")
    low, high = match[1], match[2] or match[1]
    if int(high) < int(low):
        raise _bad(text, token, "the lower bound first")
    if int(high) - int(low) >= MAX_RANGE:
        raise _bad(text, token, f"at most {MAX_RANGE} hosts in one range")
    return [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
