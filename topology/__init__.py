"""What the fabric looks like and where ranks should sit on it: no torch, no sockets of the job.

`read(path)` makes a Fabric of any file that describes one.

Reachable as `commkit.topology` only: under a second name every class would exist twice, and
`isinstance` would fail far from the cause.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "commkit.topology":
    raise ImportError(
        f"this package is commkit.topology, not {__name__}: write `import commkit.topology`",
        name=__name__,
    )

if TYPE_CHECKING:
    from commkit.topology.fabric import Fabric
    from commkit.topology.readers import read, read_text

__all__ = ["Fabric", "read", "read_text"]

#: A start-up needs host lists only: the rest is imported when it is first used.
_HOMES = {"Fabric": "fabric", "read": "readers", "read_text": "readers"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'commkit.topology' has no attribute {name!r}")
    return getattr(importlib.import_module(f"commkit.topology.{_HOMES[name]}"), name)
