"""Run modules in full precision inside a low-precision model."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from compile_fsdp.runtime.outputs import cast_floating, find_tensors
from compile_fsdp.torch_compat.dispatch import tree_map_only


class FullPrecision:
    """Mixin before a module's class that casts 16-bit inputs to float32 and outputs to the first input's dtype.

    [Note: The dtype lives as long as the call]
    The dtype of the outputs is a local variable of the call. So a module that is used twice, calls itself, or raises
    never sees the dtype of an earlier call, and Dynamo has no module state to track.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs: list[torch.Tensor] = []
        find_tensors((args, kwargs), inputs, [])
        dtypes = [tensor.dtype for tensor in inputs if tensor.is_floating_point()]
        args, kwargs = tree_map_only(torch.Tensor, _cast_up, (args, kwargs))
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return cast_floating(output, dtypes[0]) if dtypes else output


def _cast_up(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor


@cache
def _full_precision_class(cls: type[Any]) -> type[Any]:
    return type(cls.__name__, (FullPrecision, cls), {"__module__": cls.__module__})


def run_in_full_precision(module: nn.Module) -> None:
    """Make a module compute in float32 or wider dtypes. Call it before the module is sharded."""
    if not isinstance(module, FullPrecision):
        cls: Any = type(module)
        module.__class__ = _full_precision_class(cls)
