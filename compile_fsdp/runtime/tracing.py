"""Code that runs while Dynamo traces, and how traced code gets constants from it.

[Note: Three times]
Code of this project runs at one of three times. At trace time Dynamo interprets it: what it does to tensors becomes
nodes of a graph, what it does to objects is repeated after the graph has run, and nothing else of it is left. At
compile time passes and compilers work on the traced graph. At run time it is ordinary Python, before, between and after
the graphs of a step. In this folder a function without a decorator may be traced. `eval_at_trace_time` marks one that
Dynamo calls, and does not interpret, `at_run_time` one that a trace never reaches.

[Note: Numbers that stay numbers]
Where Dynamo compiles a hook as a frame of its own, behind a graph break, a number that differs from module to module
becomes a symbol on the second module, and Inductor resizes a storage to a plain number only. Text is always a constant
for Dynamo, guarded by its value. So the numbers of a module are kept as `guarded_text` beside it. Traced code hands the
text to a function that is evaluated at trace time and looks the numbers up itself, or reads one number with `int`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch

from compile_fsdp.torch_compat.autograd import get_compiled_autograd_flag, set_compiled_autograd_flag
from compile_fsdp.torch_compat.dynamo import assume_constant_result, count_outer_tracers, skip_code

_Function = TypeVar("_Function", bound=Callable[..., Any])


# The code of functions that no trace may enter: tests look for it in what Dynamo has interpreted.
RUN_TIME: set[CodeType] = set()


def at_run_time(function: _Function) -> _Function:
    """Decorator: no trace enters the function, and Dynamo does not compile its frame. See [Note: Three times]."""
    RUN_TIME.add(function.__code__)
    return inline_only(function)


def inline_only(function: _Function) -> _Function:
    """Decorator: Dynamo does not compile the function's frame by itself; a trace that comes to a call enters it."""
    skip_code(function.__code__)
    return function


def eval_at_trace_time(function: _Function) -> _Function:
    """Decorator: Dynamo calls the function while it traces the caller, and takes the result for a constant.

    The arguments are constants, too; for an object as the first, see `eval_at_trace_time_guarded`.
    """
    marked: _Function = assume_constant_result(function)  # type: ignore[no-untyped-call]
    return marked


def eval_at_trace_time_guarded(function: _Function) -> _Function:
    """Decorator: Dynamo calls the function, of one object and further constants, and takes its result for a constant.

    Graphs are guarded by the object's identity. torch 2.11 takes nothing but constants: there the function gets the
    object's id, by which Dynamo guards.
    """
    if torch.__version__ >= "2.12":
        return eval_at_trace_time(function)

    @eval_at_trace_time
    def call_by_id(number: int, *constants: Any) -> Any:
        # The caller holds the object.
        return function(ctypes.cast(number, ctypes.py_object).value, *constants)

    def call(subject: object, *constants: Any) -> Any:
        return call_by_id(id(subject), *constants)

    return call  # type: ignore[return-value]


def guarded_text(numbers: object) -> str:
    """Numbers as text: see [Note: Numbers that stay numbers]."""
    return repr(numbers)


@eval_at_trace_time
def is_deep_in_regions() -> bool:
    """Whether more than one region, as a checkpoint's, surrounds the code that is traced.

    Up to torch 2.15 no tensor gets out of two of them as an attribute of an object: "does not belong to this Graph".
    """
    return count_outer_tracers() > 1


# What compiled autograd's flag was before each `defer_hook_bodies`; empty unless a trace is between the two calls.
_flags_before: list[bool] = []


@eval_at_trace_time
def defer_hook_bodies() -> None:
    """Let hooks of tensors and modules leave their bodies to the backward's own trace, until `restore_hook_bodies`.

    Dynamo decides this by compiled autograd's flag, for the user's own hooks as for ours. Left on, it would change
    how other code is traced.
    """
    _flags_before.append(get_compiled_autograd_flag())
    set_compiled_autograd_flag(True)


@eval_at_trace_time
def restore_hook_bodies() -> None:
    """Undo one `defer_hook_bodies`; nothing if the trace in which it was called has ended."""
    if _flags_before:
        set_compiled_autograd_flag(_flags_before.pop())


@at_run_time
def restore_hook_bodies_now() -> None:
    """Undo every `defer_hook_bodies` of a trace that has ended, or failed."""
    if _flags_before:
        set_compiled_autograd_flag(_flags_before[0])
        _flags_before.clear()
