"""Functions that run while Dynamo traces, and constants that traced code gets from them.

[Note: Three times]
At trace time, Dynamo interprets code: tensor operations become graph nodes, and effects on objects are repeated after
the graph runs. At compile time, passes and compilers work on the traced graph. At run time, code is ordinary Python
around the graphs of a step. In this folder, a function without a decorator may be traced. `eval_at_trace_time` marks a
function that Dynamo calls but does not interpret. `at_run_time` marks a function that a trace never reaches.

[Note: Numbers that stay numbers]
Behind a graph break, Dynamo compiles a hook as a separate frame. A number that differs from module to module then
becomes a symbol on the second module, but Inductor resizes a storage only to a plain number. Text is always a constant
for Dynamo, guarded by its value. So traced code passes the `repr` of the numbers, made before the trace, to a function
that is evaluated at trace time and looks the numbers up, or reads one number with `int`.

[Note: One call for a whole group]
Dynamo takes milliseconds to trace each op of a parameter. A group call works on all parameters of a group at once, and
Dynamo puts it into its graph without tracing it. The backend then replaces the call with its ops
(`expand_group_calls`), before any pass reads the graph. So a group call runs on fake tensors, on fx proxies and, if a
backward falls back to eager, on real tensors. It branches on constants only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch

from compile_fsdp.torch_compat import dynamo_limits
from compile_fsdp.torch_compat.autograd import swap_compiled_autograd_flag
from compile_fsdp.torch_compat.dynamo import count_outer_tracers, skip_code

_Function = TypeVar("_Function", bound=Callable[..., Any])


# Code objects of functions that no trace may enter. Tests look for them in the code that Dynamo interpreted.
RUN_TIME: set[CodeType] = set()


def at_run_time(function: _Function) -> _Function:
    """Mark a function that no trace enters and whose frame Dynamo does not compile. See [Note: Three times]."""
    RUN_TIME.add(function.__code__)
    return inline_only(function)


def inline_only(function: _Function) -> _Function:
    """Mark a function that Dynamo inlines into a trace but whose frame it does not compile alone."""
    skip_code(function.__code__)
    return function


def eval_at_trace_time(function: _Function) -> _Function:
    """Mark a function of constants that Dynamo calls at trace time, with its result as a constant."""
    marked: _Function = torch.compiler.assume_constant_result(function)
    return marked


def eval_at_trace_time_guarded(function: _Function) -> _Function:
    """Mark a function of an object and constants; Dynamo also guards the graph by the object's identity.

    torch 2.11 accepts only constants. There, Dynamo gets the object's id and guards by it.
    """
    if torch.__version__ >= "2.12":
        return eval_at_trace_time(function)

    @eval_at_trace_time
    def call_by_id(number: int, *constants: Any) -> Any:
        # The id stays valid, because the caller holds the object.
        return function(ctypes.cast(number, ctypes.py_object).value, *constants)

    def call(subject: object, *constants: Any) -> Any:
        return call_by_id(id(subject), *constants)

    return call  # type: ignore[return-value]


# See [Note: One call for a whole group].
GROUP_CALLS: set[Callable[..., Any]] = set()


def group_call(function: _Function) -> _Function:
    """Mark a function that takes tensors and constants, and returns tensors or nothing."""
    GROUP_CALLS.add(function)
    marked: _Function = torch.compiler.allow_in_graph(function)
    return marked


# Marked for calls in traced code; a captured graph calls it, too.
keep_later_writes = eval_at_trace_time(dynamo_limits.keep_later_writes)


@eval_at_trace_time
def is_deep_in_regions() -> bool:
    """Return whether several nested regions, such as checkpoints, surround the traced code.

    Up to torch 2.15, no tensor leaves two regions as an object's attribute: "does not belong to this Graph".
    """
    return count_outer_tracers() > 1


# Compiled autograd's flag before each `defer_hook_bodies`; empty unless `restore_hook_bodies` is still to come.
_flags_before: list[bool] = []


@eval_at_trace_time
def defer_hook_bodies() -> None:
    """Leave the bodies of tensor and module hooks to the backward's trace, until `restore_hook_bodies`.

    Dynamo decides this by compiled autograd's flag, for the user's hooks as for ours. If the flag stayed on, Dynamo
    would trace the rest of the code differently.
    """
    _flags_before.append(swap_compiled_autograd_flag(True))


@eval_at_trace_time
def restore_hook_bodies() -> None:
    """Undo one `defer_hook_bodies`; do nothing if its trace ended."""
    if _flags_before:
        swap_compiled_autograd_flag(_flags_before.pop())


@at_run_time
def restore_hook_bodies_now() -> None:
    """Undo every `defer_hook_bodies` of a trace that ended or failed."""
    if _flags_before:
        swap_compiled_autograd_flag(_flags_before[0])
        _flags_before.clear()
