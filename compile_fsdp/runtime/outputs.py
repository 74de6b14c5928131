"""Find and cast the tensors in a module's inputs and outputs, in code that Dynamo can trace."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

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
    elif _is_dataclass(output):
        find_tensors([getattr(output, field.name) for field in dataclasses.fields(output)], found, unknown)
    elif isinstance(output, dict):
        find_tensors(list(output.values()), found, unknown)
    elif isinstance(output, (list, tuple)):
        for value in output:
            find_tensors(value, found, unknown)
    else:
        unknown.append(type(output).__name__)


def alias_inputs(inputs: Any) -> Any:
    """Replace the tensors that need a gradient by aliases, also in containers and dataclasses.

    A container without such tensors stays the same object, so that a module can write into it.
    """
    tensors: list[torch.Tensor] = []
    find_tensors(inputs, tensors, [])
    # The last alias first: autograd runs the backward of a later op earlier, so it adds the gradients of a tensor that
    # is passed twice in the order of the arguments.
    own = [torch.ops.aten.alias.default(each) for each in reversed(tensors) if each.requires_grad]
    return _replace(inputs, own)


def _replace(value: Any, own: list[torch.Tensor]) -> Any:
    """Replace the tensors that need a gradient, in the order of `find_tensors`, by those at the end of `own`."""
    if isinstance(value, torch.Tensor):
        return own.pop() if value.requires_grad else value
    left = len(own)
    if _is_dataclass(value):
        changes = {}
        for field in dataclasses.fields(value):
            before = len(own)
            changed = _replace(getattr(value, field.name), own)
            if len(own) < before:
                changes[field.name] = changed
        return dataclasses.replace(value, **changes) if changes else value
    if isinstance(value, dict):
        entries = {key: _replace(each, own) for key, each in value.items()}
        if len(own) == left:
            return value
        return entries if type(value) is dict else _rebuild_dict(value, entries)
    if isinstance(value, (list, tuple)):
        items = [_replace(each, own) for each in value]
        return value if len(own) == left else _rebuild(value, items)
    return value


def cast_floating(nested: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested values to `dtype`, in new containers, as eager FSDP2 does."""
    if isinstance(nested, torch.Tensor):
        return nested.to(dtype) if nested.is_floating_point() else nested
    if _is_dataclass(nested):
        fields = {each.name: cast_floating(getattr(nested, each.name), dtype) for each in dataclasses.fields(nested)}
        return dataclasses.replace(nested, **fields)
    if isinstance(nested, dict):
        entries = {key: cast_floating(each, dtype) for key, each in nested.items()}
        return _rebuild_dict(nested, entries) if isinstance(nested, OrderedDict) else entries
    if isinstance(nested, (list, tuple)) and not isinstance(nested, PackedSequence):
        return _rebuild(nested, [cast_floating(each, dtype) for each in nested])
    return nested


def move_tensors(nested: Any, device: torch.device) -> Any:
    """Move the tensors in lists, tuples and dicts to a device, in new containers unless empty, as eager FSDP2 does."""
    if isinstance(nested, (torch.Tensor, PackedSequence)):
        return nested.to(device)  # type: ignore[arg-type]
    if isinstance(nested, dict) and nested:
        entries = {key: move_tensors(each, device) for key, each in nested.items()}
        return entries if type(nested) is dict else _rebuild_dict(nested, entries)
    if isinstance(nested, (list, tuple)) and nested:
        return _rebuild(nested, [move_tensors(each, device) for each in nested])
    return nested


def _rebuild(sequence: Any, items: list[Any]) -> Any:
    """A list or tuple of the same class."""
    if type(sequence) in (list, tuple):
        return items if isinstance(sequence, list) else tuple(items)
    return type(sequence)(*items) if hasattr(sequence, "_fields") else type(sequence)(items)


def _rebuild_dict(value: Any, entries: dict[Any, Any]) -> Any:
    """A dict of the same class."""
    if type(value) is OrderedDict:  # Dynamo of torch 2.15 does not call the class of one that was made in the trace
        return OrderedDict(entries)
    return type(value)(entries)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
