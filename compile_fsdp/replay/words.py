"""Describe a traced graph's objects in words that processes can compare."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from compile_fsdp.torch_compat.dispatch import OpOverload
from compile_fsdp.torch_compat.distributed import DTensorSpec

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_TORCH_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def describe(value: Any) -> Any:
    """Describe a value by plain data.

    Values that a graph cannot tell apart have equal descriptions. An object that is no constant, no code and no tensor
    is described by its class only, because its parts that a graph reads have separate descriptions.
    """
    if isinstance(value, enum.Enum):
        return ("enum", class_name(type(value)), value.name)
    if isinstance(value, _PLAIN):
        return (type(value).__name__, value)
    if isinstance(value, _TORCH_CONSTANTS):
        return ("constant", str(value))
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(describe, value))
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, *sorted(map(describe, value), key=repr))
    if type(value) is dict:
        return ("dict", *((describe(key), describe(each)) for key, each in value.items()))
    if isinstance(value, type):
        return ("class", class_name(value))
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if isinstance(value, DeviceMesh):
        return ("mesh", value.device_type, tuple(value.shape), value.mesh_dim_names)
    if isinstance(value, DTensorSpec):
        return ("spec", describe(value.mesh), str(value.placements), tuple(value.shape))
    if isinstance(value, (FunctionType, MethodType, BuiltinFunctionType, ModuleType, OpOverload, CodeType)):
        return _describe_code(value)
    return ("object", class_name(type(value)))


def _describe_tensor(tensor: torch.Tensor) -> Any:
    layout = tuple(tensor.stride()) if tensor.layout is torch.strided else None
    return (
        class_name(type(tensor)),
        *(str(tensor.dtype), str(tensor.device), tuple(tensor.shape), layout),
        *(tensor.requires_grad, tensor.is_inference(), tensor.is_conj(), tensor.is_neg()),
    )


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _describe_code(value: Any) -> Any:
    if isinstance(value, ModuleType):
        return ("module", value.__name__)
    if isinstance(value, OpOverload):
        return ("op", str(value))
    if isinstance(value, CodeType):
        return ("code", value.co_name, hash_code(value))
    if isinstance(value, MethodType):
        return ("method", _describe_code(value.__func__))
    name = f"{value.__module__}.{value.__qualname__}"
    return ("function", name, hash_code(value.__code__)) if isinstance(value, FunctionType) else ("builtin", name)


def hash_code(code: CodeType) -> str:
    """Hash a function's code without its file and lines."""
    digest = hashlib.sha256()
    for part in _parts_of_code(code):
        digest.update(repr(part).encode() + b"\n")
    return digest.hexdigest()


def _parts_of_code(code: CodeType) -> Iterator[object]:
    yield code.co_code
    yield from (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    yield (code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts_of_code(constant)
        else:
            yield describe(constant)
