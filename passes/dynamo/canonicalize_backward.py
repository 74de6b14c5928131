"""Make the calls of a captured backward equal in every process.

Precondition  a graph as Dynamo has traced it
Match         calls of functions that compiled autograd has made for this backward, or bound when it first met them
Rewrite       a call that checks gradients is replaced by the ops that it ends in; gradient accumulation is called by
              our name, and may return the gradient of a block itself; nodes are numbered
Report        nothing, because a call that stays only keeps the graph out of AOTAutograd's cache

    before                                                     after
    call_aot_bwd_prologue = call_aot_bwd_prologue((saved,), ..., (grad,))
    tangent = call_aot_bwd_prologue[1]
    mm = aten.mm(tangent, saved)                               node_7 = aten.mm(grad, saved)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from compile_fsdp.ops import accumulate_gradient
from compile_fsdp.ops.call_block import BLOCK_CALLS
from compile_fsdp.passes.analysis.aliases import fake_value
from compile_fsdp.torch_compat.autograd import autograd_function
from compile_fsdp.torch_compat.dispatch import chunk_cat, is_wrapper_subclass

# Compiled autograd's functions that may return their arguments.
_HAND_ON = ("validate_outputs", "call_aot_bwd_prologue")


def canonicalize_backward(graph: fx.Graph, fake_mode: Any) -> None:
    """Rewrite a backward graph; its values stay equal.

    `fake_mode`: the mode that made the graph's fake values; new nodes get fake values, too.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        function = autograd_function(node)
        if function == "AccumulateGrad":
            node.target = accumulate_gradient
            ((gradient,), *_), is_copied = node.args, all(map(_is_only_copied, node.users))
            # Not of a single op, because Inductor moves an op to its first reader if nothing pins it, and so behind
            # later gathers, and what it reads stays in memory.
            source = gradient.args[0] if gradient.target is operator.getitem else None
            is_of_block = isinstance(source, fx.Node) and source.target in BLOCK_CALLS
            node.update_kwarg("is_only_copied", is_copied and is_of_block)
        elif function in _HAND_ON and all(user.target is operator.getitem for user in node.users):
            _inline(graph, node, fake_mode)
    for number, node in enumerate(graph.nodes):
        if node.op != "placeholder":
            node._rename(f"node_{number}")  # part of the cache key; names differ if the forward came from a cache


def _is_only_copied(gradient: fx.Node) -> bool:
    """Return whether the graph reads a gradient only to copy it, perhaps cast or in pieces, for its reduction."""
    copies, passes_on = (chunk_cat, chunk_cat.default, torch.cat), (operator.getitem, "to", "chunk")
    return all(user.target in copies or (user.target in passes_on and _is_only_copied(user)) for user in gradient.users)


def _inline(graph: fx.Graph, node: fx.Node, fake_mode: Any) -> None:
    inputs = node.all_input_nodes
    fakes = [fake_value(each) for each in inputs]
    if not all(isinstance(fake, torch.Tensor) and not is_wrapper_subclass(fake) for fake in fakes):
        return  # symbolic sizes, or subclasses, which the call takes apart
    used = [user.args[1] for user in node.users]

    def call(*values: torch.Tensor) -> list[Any]:
        by_node = dict(zip(inputs, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: by_node[each])
        assert callable(node.target)
        results: Any = node.target(*args, **kwargs)
        return [results[i] for i in used]

    with fake_mode, torch.no_grad():
        traced = make_fx(call)(*fakes)
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.inserting_before(node):
        results: Any = graph.graph_copy(traced.graph, copies)
    for each, copy in copies.items():
        if each.op != "placeholder":
            copy.meta = {"example_value": each.meta.get("val")}
    for user, result in zip(list(node.users), results, strict=True):
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(node)
