"""Lets the host's kernels work on the devices' memory, so that whole models run on the rig.

A device's memory is the host's, so a tensor of a device is also one of the CPU at the same address.
Whatever torch has a CUDA kernel for is registered anew: it waits for the current stream, does the
same on the CPU, and copies what is new to the device.  So the host waits for its arithmetic, while
collectives go on in their own streams as before.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

#: They make, resize or look at tensors without a kernel.
KEPT = {"resize_", "record_stream", "_local_scalar_dense", "is_set_to", "equal"}
#: No kernel of their own, but one of those that they end in is out of reach.
ALSO = ("copy_",)

_library: torch.library.Library | None = None


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return torch.empty(0, dtype=tensor.dtype).set_(flat, *place)


def _replacement(operator: Any) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        known: list[tuple[torch.Tensor, torch.Tensor]] = []

        def to_host(value: Any) -> Any:
            if isinstance(value, torch.Generator):
                return None
            if not isinstance(value, torch.Tensor) or not value.is_cuda:
                return value
            if not known:
                torch.cuda.current_stream(value.device).synchronize()
            known.append((_on_host(value), value))
            return known[-1][0]

        arguments, options = tree_map(to_host, (arguments, options))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = operator(*arguments, **options)
        for alias, original in known:
            if alias.shape != original.shape:  # an `out` that had no room
                original.resize_(alias.shape).copy_(alias)
        device = known[0][1].device if known else None

        def to_device(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            same = [original for alias, original in known if alias is value]
            return same[0] if same else value.to(device)

        return tree_map(to_device, result)

    return call


def _replaceable(name: str) -> bool:
    if not name.startswith("aten::") or name.removeprefix("aten::").partition(".")[0] in KEPT:
        return False
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
        return False
    base, _, overload = name.removeprefix("aten::").partition(".")
    try:
        schema = getattr(getattr(torch.ops.aten, base), overload or "default")._schema
    except AttributeError:
        return False
    makes = any(argument.name == "device" for argument in schema.arguments)
    views = any(
        one.alias_info is not None and not one.alias_info.is_write for one in schema.returns
    )
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    sets = base in ("set_",)
    return takes and not makes and not views and not sets


def install() -> int:
    """In this process, for good; returns how many operators it replaced."""
    global _library
    if _library is not None:
        return 0
    _library = torch.library.Library("aten", "IMPL")
    names = [n for n in sorted(torch._C._dispatch_get_all_op_names()) if _replaceable(n)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a kernel already
        for name in [n.removeprefix("aten::") for n in names] + list(ALSO):
            base, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            _library.impl(name, _replacement(operator), "CUDA")
    return len(names)
