"""Find and cast the tensors in a module's inputs and outputs, in code that Dynamo can trace."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from compile_fsdp.torch_compat.dispatch import tree_map_only

# Types of output values that hide no tensors, beside the containers below.
_PLAIN = (int, float, bool, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def find_tensors(output: Any, found: list[torch.Tensor], unknown: list[str]) -> None:
    """Append the tensors of a nested output to `found`, and the types of objects that may hide tensors to `unknown`.

    Goes into lists, tuples (also named tuples), dicts and dataclasses, as eager FSDP2 does.
    """
    if output is None or isinstance(output, _PLAIN):
        return
    if isinstance(output, torch.Tensor):
        found.append(output)
    elif isinstance(output, dict):
        find_tensors(list(output.values()), found, unknown)
    elif isinstance(output, (list, tuple)):
        for value in output:
            find_tensors(value, found, unknown)
    elif dataclasses.is_dataclass(output):
        find_tensors([getattr(output, field.name) for field in dataclasses.fields(output)], found, unknown)
    else:
        unknown.append(type(output).__name__)


def cast_floating(nested: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested values to `dtype`."""
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, nested
    )
