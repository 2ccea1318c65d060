"""commkit for code that only knows torch.distributed.

`install` replaces init_process_group wherever torch and loaded modules have bound it, and wraps
what creates groups (patch_groups); the end of the default group is seen by `api`, which wraps the
setter that all ways to end it call.  `commkit.patch()` is `commkit.patch.install()`.  While
torch.distributed is not imported yet, it waits for that import, so that a script still decides what
happens before it.  Processes that multiprocessing starts by `spawn` or `forkserver` are patched in
the same way.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_NAME = "init_process_group"
_TORCH = "torch.distributed"

#: (module, torch's function) for every binding replaced; empty when not installed.
_replaced: list[tuple[ModuleType, Any]] = []
_spawn_original: Any = None


def install() -> None:
    """Makes torch.distributed.init_process_group commkit's.  Installing twice changes nothing."""
    _install_in_children()
    if _TORCH in sys.modules and hasattr(sys.modules[_TORCH], _NAME):
        _replace()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def uninstall() -> None:
    """Puts torch's function back wherever `install` replaced it."""
    global _spawn_original
    if _replaced:
        from commkit import api, patch_groups

        patch_groups.uninstall()
        api.as_torch = False
    sys.meta_path[:] = [item for item in sys.meta_path if not isinstance(item, _AfterImport)]
    for module, original in _replaced:
        setattr(module, _NAME, original)
    _replaced.clear()
    if _spawn_original is not None:
        import multiprocessing.spawn

        multiprocessing.spawn.get_preparation_data = _spawn_original
        _spawn_original = None


def installed() -> bool:
    """Whether torch's function is replaced now."""
    return bool(_replaced)


def _replace() -> None:
    if _replaced:
        return
    from commkit import api, patch_groups

    patch_groups.install()
    api.as_torch = True
    original = api._torch_init
    # device_mesh, DDP and scripts have bound the function by name: those bindings count.
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__dict__.get(_NAME) is original:
            setattr(module, _NAME, api.init_process_group)
            _replaced.append((module, original))


class _Callable(ModuleType):
    """`commkit.patch()`: what it is called in scripts."""

    def __call__(self) -> None:
        install()


sys.modules[__name__].__class__ = _Callable


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs `_replace` when torch.distributed has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TORCH:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        if hasattr(module, _NAME):
            _replace()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _InChild:
    """Travels in the data that multiprocessing sends to a new interpreter; loading it installs."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return install, ()


def _install_in_children() -> None:
    global _spawn_original
    if _spawn_original is not None:
        return
    import multiprocessing.spawn

    _spawn_original = original = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "commkit": _InChild()}

    multiprocessing.spawn.get_preparation_data = get_preparation_data
