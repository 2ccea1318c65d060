"""Output of several ranks in one file, as launchers prefix and mix it."""

from __future__ import annotations

import re

#: Open MPI's --tag-output (also behind another tool's prefix), MPICH's -prepend-rank, srun's
#: --label.
_TAGS = (
    re.compile(r"(?:\([^)]*\) )?\[(?:\d+,)?\d+\]<(?:stdout|stderr)>: ?"),
    re.compile(r"\[\d+\] (?=[# \d])"),
    re.compile(r" *\d+: (?=[# \d]|$)"),
)


def streams(text: str) -> list[list[tuple[int, str]]]:
    """(line number, line without its prefix) of each source, in order of first appearance."""
    found: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        tag = ""
        for pattern in _TAGS:
            match = pattern.match(line)
            if match is not None:
                tag, line = match[0].strip(), line[match.end() :]
                break
        found.setdefault(tag, []).append((number, line))
    return list(found.values())
