"""Functions that work on all parameters of a group and that Dynamo does not trace into.

[Note: One call for a whole group]
Dynamo takes milliseconds to trace each op of a parameter. A group call works on all parameters of a group at once, and
Dynamo puts it into its graph without tracing it. The backend then replaces the call with its ops
(`expand_group_calls`), before any pass reads the graph. So a group call runs on fake tensors, on fx proxies and, if a
backward falls back to eager, on real tensors. It branches on constants only.
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
