"""What commkit writes into the environment of its own process, and takes back when the world ends.

Variables of ranks that the bench forks itself are set there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from commkit import _C
from commkit.errors import LaunchError


class Exported:
    """Variables that commkit has set; `withdraw` removes those that still have its value."""

    def __init__(self) -> None:
        self._mine: dict[str, str] = {}
        self._before: dict[str, str] = {}

    def add(self, variables: Mapping[str, str]) -> None:
        """Sets each variable that has no value yet; what a launcher or the user set stays."""
        for name, value in variables.items():
            if name not in os.environ:
                os.environ[name] = self._mine[name] = value

    def replace(self, variables: Mapping[str, str]) -> None:
        """Sets each variable, also those that have a value, which `withdraw` puts back."""
        for name, value in variables.items():
            if name in os.environ:
                self._before[name] = os.environ[name]
            os.environ[name] = self._mine[name] = value

    def withdraw(self) -> None:
        """Takes them back, so that the next world in this process is not read from this one's."""
        for name, value in self._mine.items():
            if os.environ.get(name) != value:
                continue
            if name in self._before:
                os.environ[name] = self._before[name]
            else:
                del os.environ[name]
        self._mine.clear()
        self._before.clear()


def described(name: str) -> str:
    """`NAME='value'` or `NAME is not set`, for error messages."""
    value = os.environ.get(name)
    return f"{name} is not set" if value is None else f"{name}={value!r}"


def check_gloo_interface() -> None:
    """Raises LaunchError if GLOO_SOCKET_IFNAME is no list of names of interfaces that exist."""
    value = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not value:
        return
    names = sorted({entry["name"] for entry in _C.interfaces()})
    wrong = [name for name in value.split(",") if name not in names]
    if not wrong:
        return
    if value[0] in "^=":
        meant = ", ".join(_C.match_interfaces(value, names)) or "none of them"
        hint = f"NCCL's syntax is not gloo's; it would mean {meant}"
    else:
        hint = f"{wrong[0]!r} is none"
    raise LaunchError(
        f"GLOO_SOCKET_IFNAME={value!r}: expected names of interfaces out of {', '.join(names)}; "
        f"{hint}; set a name, or unset it (commkit sets it where several hosts take part)"
    )
