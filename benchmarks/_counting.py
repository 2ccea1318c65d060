"""Counts what reaches a rank's TCPStore; what the client's constructor sends is not among it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

_SINGLE = "set add wait check append compare_set multi_set delete_key num_keys"

#: method -> messages that torch's client sends for it: a get waits first.
MESSAGES = {
    **dict.fromkeys(f"{_SINGLE} queue_push queue_pop queue_len".split(), 1),
    "get": 2,
    "multi_get": 2,
}

_kept: list[Any] = []  # torch does not keep a Python Store's Python half alive


class Operations:
    """`count`: calls.  `messages`: what the server was sent for them."""

    def __init__(self) -> None:
        self.count = self.messages = 0

    def install(self) -> None:
        for name in ("torch.distributed.rendezvous", "commkit.store"):
            module: Any = importlib.import_module(name)
            original = module.TCPStore
            module.TCPStore = lambda *a, _real=original, **k: self.wrap(_real(*a, **k))

    def wrap(self, inner: Any) -> Any:
        counter = self

        class Counting(Store):
            def set_timeout(self, timeout: timedelta) -> None:
                super().set_timeout(timeout)
                inner.set_timeout(timeout)

            def has_extended_api(self) -> bool:
                return bool(inner.has_extended_api())

            def clone(self) -> Store:
                return counter.wrap(inner.clone())  # type: ignore[no-any-return]

        def counted(name: str) -> Callable[..., Any]:
            def call(self: Any, *arguments: Any) -> Any:
                counter.count += 1
                counter.messages += MESSAGES[name]
                return getattr(inner, name)(*arguments)

            return call

        for name in MESSAGES:
            setattr(Counting, name, counted(name))
        # Torch's C++ side looks these two up under their C++ names.
        setattr(Counting, "deleteKey", counted("delete_key"))  # noqa: B010
        setattr(Counting, "getNumKeys", counted("num_keys"))  # noqa: B010
        made = Counting()
        _kept.append(made)
        return made
