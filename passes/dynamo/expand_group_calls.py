"""Replace each group call by the ops that it calls.

Precondition  a graph as Dynamo has traced it; the function decides on constants alone
Match         calls of the given functions
Rewrite       the ops that the function calls on its arguments, in its order
Report        nothing, because no later pass, and no user, sees such a call

    before                                    after
    fill([weight], [value], [16])             resize_storage_bytes_(weight, 16)
                                              copy_(weight, value)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch
from torch import fx

from compile_fsdp.passes.analysis.aliases import call_target, fake_arguments
from compile_fsdp.passes.analysis.eager_effects import is_upkeep


def expand_group_calls(graph: fx.Graph, functions: Container[Callable[..., Any]]) -> None:
    """Expand each call of a function in `functions`; new nodes get fake values, too.

    The functions take tensors, constants, and lists and tuples of both, and return a tensor, a tuple of tensors or
    nothing.
    """
    for node in list(graph.nodes):
        if node.target in functions:
            _expand(node)


def _expand(node: fx.Node) -> None:
    tracer = fx.proxy.GraphAppendingTracer(node.graph)
    to_proxy: Any = partial(fx.Proxy, tracer=tracer)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), to_proxy)
    before = node.prev
    with node.graph.inserting_before(node):
        assert callable(node.target)
        result = node.target(*args, **kwargs)
    while (before := before.next) is not node:
        _evaluate(before)
    if isinstance(result, fx.Proxy):
        node.replace_all_uses_with(result.node)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(result[user.args[1]].node)
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def _evaluate(node: fx.Node) -> None:
    if is_upkeep(node):  # A fill or free does not run, because it wrote when Dynamo ran the call.
        node.meta["example_value"] = None
        return
    args, kwargs = fake_arguments((node.args, node.kwargs))
    with torch.no_grad():
        node.meta["example_value"] = call_target(node.target, args, kwargs)
