"""Describe a traced graph's objects in words that processes can compare."""

from __future__ import annotations

import enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compile_fsdp.replay.classes import class_name, describe_class, describe_constant, hash_code
from compile_fsdp.torch_compat.dispatch import OpOverload
from compile_fsdp.torch_compat.distributed import DTensorSpec


def describe(value: Any) -> Any:
    """Describe a value by plain data.

    Values that a graph cannot tell apart have equal descriptions. An object that is no constant, no code and no tensor
    is described by its class only, because its parts that a graph reads have separate descriptions.
    """
    if isinstance(value, enum.Enum):
        return ("enum", class_name(type(value)), value.name, describe(value.value))
    if (constant := describe_constant(value)) is not None:
        return constant
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(describe, value))
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, *sorted(map(describe, value), key=repr))
    if type(value) is dict:
        return ("dict", *((describe(key), describe(each)) for key, each in value.items()))
    if isinstance(value, type):
        return ("class", describe_class(value))
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if isinstance(value, DeviceMesh):
        return ("mesh", value.device_type, tuple(value.shape), value.mesh_dim_names)
    if isinstance(value, DTensorSpec):
        return ("spec", describe(value.mesh), str(value.placements), tuple(value.shape))
    if isinstance(value, (FunctionType, MethodType, BuiltinFunctionType, ModuleType, OpOverload, CodeType)):
        return _describe_code(value)
    return ("object", describe_class(type(value)))


def describe_place(value: DeviceMesh | dist.ProcessGroup) -> Any:
    """Describe the ranks of a mesh or group, and this rank's place among them."""
    if isinstance(value, DeviceMesh):
        return (repr(value.mesh.tolist()), repr(value.get_coordinate()))
    return (tuple(dist.get_process_group_ranks(value)), dist.get_rank(value))


def _describe_tensor(tensor: torch.Tensor) -> Any:
    layout = tuple(tensor.stride()) if tensor.layout is torch.strided else None
    return (
        describe_class(type(tensor)),
        *(str(tensor.dtype), str(tensor.device), tuple(tensor.shape), layout),
        *(tensor.requires_grad, tensor.is_inference(), tensor.is_conj(), tensor.is_neg()),
    )


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
