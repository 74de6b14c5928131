"""Sizes and layouts of fake tensors, compared without a guard.

[Note: Full size]
A window is full if its resize asks for at least the bytes that the parameter's view of the storage reaches. The resize
may ask for more: if dim 0 does not divide by the number of ranks, the storage is the all-gather output, padding
included, and the parameter is a view of its front. A smaller resize leaves part of the parameter without memory, so its
window stays.
"""

from __future__ import annotations

import torch
from torch import SymInt, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from compile_fsdp.passes.analysis.aliases import fake_value
from compile_fsdp.passes.analysis.effects import find_resizes, get_argument, is_resize, parameter_of
from compile_fsdp.passes.report import Kept


def get_size(argument: object) -> int | SymInt | None:
    """Return the value of a size argument, or None if unknown."""
    value = fake_value(argument) if isinstance(argument, fx.Node) else argument
    return value if isinstance(value, (int, SymInt)) else None


def size_hint(size: int | SymInt | None) -> int:
    """Return the size or its symbolic hint; 0 without a hint."""
    if isinstance(size, SymInt):
        return int(size.node.hint) if size.node.has_hint() else 0
    return size or 0


def needed_bytes(tensor: torch.Tensor) -> int | SymInt:
    """Return the bytes from the storage's start to the last element of a strided tensor."""
    if statically_known_true(tensor.numel() == 0):
        return 0
    last: int | SymInt = tensor.storage_offset()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last = last + (size - 1) * stride
    return (last + 1) * tensor.itemsize


def is_zero(size: int | SymInt | None) -> bool:
    return statically_known_true(size == 0)


def is_free(node: fx.Node) -> bool:
    return is_resize(node) and is_zero(get_size(get_argument(node, 1, "new_size")))


def find_freed(graph: fx.Graph) -> set[fx.Node | None]:
    return {parameter_of(node) for node in find_resizes(graph) if is_free(node)}


def is_full(size: int | SymInt | None, tensor: torch.Tensor | None) -> bool:
    """Return whether `size` bytes surely hold the tensor. See [Note: Full size]."""
    if size is None or tensor is None or tensor.layout is not torch.strided:
        return False
    return statically_known_true(size >= needed_bytes(tensor))


def find_copy_fault(param: torch.Tensor | None, value: torch.Tensor | None) -> Kept | None:
    """Return why copying `value` into `param` is visible to readers; None if the copy only moves bytes."""
    if param is None or value is None or not (param.layout is value.layout is torch.strided):
        return Kept.UNKNOWN_LAYOUT
    if param.dtype != value.dtype or param.device != value.device or _bits(param) != _bits(value):
        return Kept.COPY_CONVERTS
    if not _are_equal(param.shape, value.shape):
        return Kept.COPY_BROADCASTS
    if not _are_equal(param.stride(), value.stride()):
        return Kept.COPY_RESTRIDES
    return None


def _bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_conj(), tensor.is_neg()


def _are_equal(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    return len(left) == len(right) and all(statically_known_true(a == b) for a, b in zip(left, right, strict=True))
