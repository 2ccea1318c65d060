"""commkit: starts, places and measures the communication of large PyTorch jobs.

`import commkit` does not import torch; the names of commkit.api are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from commkit.errors import (
    CommkitError,
    DigestMismatch,
    JoinError,
    JoinTimeout,
    LaunchError,
    LayoutError,
    LayoutTypeError,
    NoTopology,
    OverlayError,
    OverlayTimeout,
    RankDied,
    TopologyError,
    UsageError,
    WrongData,
)
from commkit.version import VERSION as __version__

if TYPE_CHECKING:
    from commkit import patch
    from commkit.api import (
        destroy_process_group,
        device_mesh,
        get_group,
        get_groups,
        init_process_group,
        new_group,
        new_groups,
        running_topology,
        split_group,
        start_report,
    )

__all__ = [
    "CommkitError",
    "DigestMismatch",
    "JoinError",
    "JoinTimeout",
    "LaunchError",
    "LayoutError",
    "LayoutTypeError",
    "NoTopology",
    "OverlayError",
    "OverlayTimeout",
    "RankDied",
    "TopologyError",
    "UsageError",
    "WrongData",
    "__version__",
    "destroy_process_group",
    "device_mesh",
    "get_group",
    "get_groups",
    "init_process_group",
    "new_group",
    "new_groups",
    "patch",
    "running_topology",
    "split_group",
    "start_report",
]


def __getattr__(name: str) -> Any:
    # Only names of __all__ that are not bound above come here: commkit.patch, and those of
    # commkit.api.
    if name not in __all__:
        raise AttributeError(f"module 'commkit' has no attribute {name!r}")
    if name == "patch":
        return importlib.import_module("commkit.patch")
    value = getattr(importlib.import_module("commkit.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
