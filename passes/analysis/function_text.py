"""Describe a function by its code and by all that its code reads.

[Note: Equal functions]
Two functions have equal texts if their code is equal, and their defaults, the variables that they close over and the
globals that they name. What torch and Python define has the text of its name. A function that reads anything else, such
as a dict that counts its calls, has no text, because nothing tells that it decides like another.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

import torch

from compile_fsdp.torch_compat.dispatch import OpOverload, OpOverloadPacket

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, Enum, OpOverload, OpOverloadPacket)


def function_text(function: object) -> str | None:
    """Return the text of a function or a partial, equal in every process; None if it has none."""
    try:
        return _text(function, ())
    except _NoTextError:
        return None


class _NoTextError(Exception):
    pass


def _text(value: object, outer: tuple[object, ...]) -> str:
    """Describe a value. `outer`: functions that read it."""
    if isinstance(value, _CONSTANTS):
        return f"{type(value).__qualname__} {value!r}"
    if isinstance(value, (tuple, list)):
        return _texts(value, outer)
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(_text(each, outer) for each in value))}}}"
    if isinstance(value, partial):
        return f"partial {_texts((value.func, value.args, *sorted(value.keywords.items())), outer)}"
    if isinstance(value, (ModuleType, type, FunctionType, BuiltinFunctionType)) and is_library(value):
        return _name(value)
    if isinstance(value, FunctionType):
        return "itself" if value in outer else _function(value, (*outer, value))
    raise _NoTextError


def _texts(values: Iterable[object], outer: tuple[object, ...]) -> str:
    return f"[{', '.join(_text(each, outer) for each in values)}]"


def _function(function: FunctionType, outer: tuple[object, ...]) -> str:
    try:
        closed_over = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        raise _NoTextError from None  # a variable without a value
    codes = [*codes_in(function.__code__)]
    names = sorted({name for code in codes for name in code.co_names if name in function.__globals__})
    constants = [each for code in codes for each in code.co_consts if not isinstance(each, CodeType)]
    read = [(name, function.__globals__[name]) for name in names]
    defaults = function.__defaults__, sorted((function.__kwdefaults__ or {}).items())
    facts = [(code.co_code, code.co_names, code.co_varnames, code.co_freevars) for code in codes]
    return _texts((facts, constants, read, defaults, closed_over), outer)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes_in(each)


def is_library(value: ModuleType | type | FunctionType | BuiltinFunctionType) -> bool:
    """Return whether torch or Python defines a value, under a name."""
    name = _name(value)
    root = name.split(".")[0]
    return "<" not in name and (root in ("torch", "builtins") or root in sys.stdlib_module_names)


def _name(value: ModuleType | type | FunctionType | BuiltinFunctionType) -> str:
    return value.__name__ if isinstance(value, ModuleType) else f"{value.__module__}.{value.__qualname__}"
