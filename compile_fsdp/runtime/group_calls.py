"""Functions that work on all parameters of a group, and that Dynamo does not look into.

[Note: One call for a whole group]
Dynamo interprets what it traces bytecode by bytecode, which takes milliseconds for every op of a parameter. A group
call works on all parameters of a group at once, and Dynamo puts the call, unread, into its graph. The backend then puts
the call's ops in its place (`expand_group_calls`), before anything else looks at the graph. So a group call runs on
fake tensors, on fx proxies and, where a backward falls back to eager, on real ones: it decides on constants alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

# See [Note: One call for a whole group].
GROUP_CALLS: set[Callable[..., Any]] = set()


def group_call(function: _Function) -> _Function:
    """Mark a function that takes tensors and constants, and returns tensors or nothing."""
    GROUP_CALLS.add(function)
    marked: _Function = torch.compiler.allow_in_graph(function)
    return marked
