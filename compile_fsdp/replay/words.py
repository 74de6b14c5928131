"""Describe objects of a traced graph, their classes and their code in words that processes can compare.

[Note: Members of a class]
Dynamo guards that an object has the class that it had at trace time, and finds methods and descriptors through this
class without further guards. A later process may define a class of this name with different bases or members. So a
class is described by its bases and members, and by those of its metaclass and of its descriptors' classes.
"""

from __future__ import annotations

import abc
import enum
import hashlib
import re
from collections.abc import Collection, ItemsView, KeysView, Sized, ValuesView
from functools import cache, cached_property, partial, partialmethod
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from compile_fsdp.torch_compat.dispatch import OpOverload, OpOverloadPacket
from compile_fsdp.torch_compat.distributed import DTensorSpec
from compile_fsdp.torch_compat.global_state import autocast_settings

PLAIN = (type(None), bool, int, float, complex, str, bytes)
TORCH_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format)

# Packages whose classes the versions of Python, of torch and of this project identify.
_KNOWN = {"builtins", "compile_fsdp", "torch"}

# Members that Python or a copy adds, or that no graph depends on.
_IGNORED = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__firstlineno__", "__static_attributes__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__slotnames__", "_abc_impl"),
}

# Number of functions inside each other's closures that are described.
_MOST_CLOSURES = 4


def describe(value: Any) -> Any:
    """Describe a value by plain data.

    Values that a graph cannot tell apart have equal descriptions. An object that is no constant, no code and no tensor
    is described by its class only, because its parts that a graph reads have separate descriptions. If it has no parts
    that Python code sets, as `torch.finfo` or a compiled pattern, its `repr` describes it, unless that has an address.
    """
    if isinstance(value, enum.Enum):
        return ("enum", class_name(type(value)), value.name, describe(value.value))
    if (constant := _describe_constant(value)) is not None:
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
    if isinstance(value, Placement):
        return ("placement", describe_class(type(value)), repr(value))
    if isinstance(value, torch.autocast):
        return ("autocast", describe_class(type(value)), repr(autocast_settings(value)))
    if isinstance(value, _CODE):
        return _describe_code(value)
    if isinstance(value, (KeysView, ValuesView, ItemsView)):
        return (type(value).__name__, *map(describe, value))
    if _is_opaque(value) and _ADDRESS.search(text := repr(value)) is None:
        return ("object", describe_class(type(value)), text)
    return ("object", describe_class(type(value)))


_CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, OpOverload, OpOverloadPacket, CodeType)
_ADDRESS = re.compile("0x[0-9a-f]{6}")


def _is_opaque(value: object) -> bool:
    """Return whether an object has no parts that Python code sets, so that only a guard on the whole tells it apart."""
    if type(value).__module__.partition(".")[0] in ("numpy", "typing"):
        return not isinstance(value, Sized)  # no array
    if hasattr(value, "__dict__") or any("__slots__" in vars(base) for base in type(value).__mro__):
        return False
    return not isinstance(value, Collection) or isinstance(value, range)


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
    if isinstance(value, (OpOverload, OpOverloadPacket)):
        return ("op", str(value))
    if isinstance(value, CodeType):
        return ("code", value.co_name, hash_code(value))
    if isinstance(value, MethodType):
        return ("method", _describe_code(value.__func__))
    name = f"{value.__module__}.{value.__qualname__}"
    return ("function", name, hash_code(value.__code__)) if isinstance(value, FunctionType) else ("builtin", name)


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def base_names(cls: type) -> list[str]:
    """Return the names of a class and of its bases; FSDP2's class of a sharded module alone hides the user's class."""
    return [class_name(base) for base in cls.__mro__]


def describe_class(cls: type) -> str:
    """Describe a class by its name and a hash of its bases and members. See [Note: Members of a class]."""
    return _describe_class(cls)


@cache
def _describe_class(cls: type) -> str:
    words: list[object] = []
    described: set[type] = set()
    classes = [cls, type(cls)]
    for each in classes:
        words.append(base_names(each))
        for base in each.__mro__:
            if base not in described:
                described.add(base)
                members, descriptors = _members(base)
                words.append(members)
                classes += descriptors
    return f"{class_name(cls)} {hash_words(words)[:16]}"


def forget_classes() -> None:
    """Describe classes anew from now on, because a program may replace members."""
    _describe_class.cache_clear()
    _members.cache_clear()


@cache
def _members(cls: type) -> tuple[str, list[type]]:
    """Return words for the members that a class itself defines, and the classes of its descriptors."""
    is_known = _is_known(cls)
    words: list[object] = []
    descriptors: list[type] = []
    for name, member in sorted(vars(cls).items(), key=lambda item: str(item[0])):
        if is_known:
            if _is_replaced(member):
                words.append((name, _describe_member(member)))
        elif name not in _IGNORED:
            words.append((name, _describe_member(member)))
            if hasattr(type(member), "__get__") and not _is_known(type(member)):
                descriptors.append(type(member))
    dump = getattr(abc, "_get_dump", None)  # CPython's; its first item are the registered classes
    if isinstance(cls, abc.ABCMeta) and not is_known and dump is not None:
        registered = (reference() for reference in dump(cls)[0])
        words.append(sorted(class_name(each) for each in registered if each is not None))
    return repr(words), descriptors


def _is_known(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in _KNOWN


def _is_replaced(member: object) -> bool:
    """Return whether a member of a known class is a function of an unknown module."""
    function = getattr(member, "__func__", member) if isinstance(member, (staticmethod, classmethod)) else member
    function = function.fget if isinstance(function, property) else function
    return isinstance(function, FunctionType) and not _is_known(function)


def _describe_member(member: Any, closures: int = _MOST_CLOSURES) -> object:
    """Describe code with its defaults and closures, a constant by value, and any other object by its class's name."""
    describe = partial(_describe_member, closures=closures)
    name = class_name(type(member))
    if isinstance(member, FunctionType):
        defaults = describe(member.__defaults__), describe(tuple((member.__kwdefaults__ or {}).items()))
        cells = [_describe_cell(cell, closures - 1) for cell in member.__closure__ or () if closures > 0]
        return (name, hash_code(member.__code__), defaults, cells)
    if isinstance(member, (staticmethod, classmethod, MethodType)):
        return (name, describe(member.__func__))
    if isinstance(member, property):
        return (name, describe(member.fget), describe(member.fset), describe(member.fdel))
    if isinstance(member, cached_property):
        return (name, describe(member.func))
    if isinstance(member, (partial, partialmethod)):
        return (name, *map(describe, (member.func, member.args, tuple(member.keywords.items()))))
    if isinstance(member, _CachedFunction):
        return (name, describe(member.__wrapped__))
    if isinstance(member, (tuple, frozenset)):
        items = [*map(describe, member)]
        return (name, sorted(items, key=repr) if isinstance(member, frozenset) else items)
    if isinstance(member, type):
        return (name, class_name(member))
    return _describe_constant(member) or name


_CachedFunction = type(cache(len))


def _describe_cell(cell: Any, closures: int) -> object:
    try:
        return _describe_member(cell.cell_contents, closures)
    except ValueError:  # the variable is not assigned yet
        return None


def _describe_constant(value: Any) -> tuple[Any, ...] | None:
    """Describe a constant by its value; None for an object that is no constant."""
    if isinstance(value, enum.Enum):
        return ("enum", class_name(type(value)), value.name, _describe_member(value.value))
    if isinstance(value, (float, complex)):
        return (type(value).__name__, repr(value))  # 0.0 and -0.0 differ, and nan is equal to itself
    if isinstance(value, PLAIN):
        return (type(value).__name__, value)
    if isinstance(value, TORCH_CONSTANTS):
        return ("constant", str(value))
    return None


def hash_words(described: object) -> str:
    """Hash a description, equally in every process."""
    return hashlib.sha256(repr(described).encode()).hexdigest()


def hash_code(code: CodeType) -> str:
    """Hash a function's code without its file and lines."""
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags
    constants = [hash_code(each) if isinstance(each, CodeType) else _describe_member(each) for each in code.co_consts]
    return hash_words((code.co_code, names, counts, constants))
