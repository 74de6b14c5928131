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
    """Cast the floating-point tensors in nested values, also in dataclasses and in subclasses of dict, to `dtype`."""

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, dict):
            return {key: cast_floating(each, dtype) for key, each in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return dataclasses.replace(value, **cast_floating(fields, dtype))
        return value

    return tree_map_only(object, cast, nested)
