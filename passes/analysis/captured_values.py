"""Shapes and dtypes in a captured backward, which itself records none."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compile_fsdp.torch_compat.autograd import is_gradient_hook, may_hand_on
from compile_fsdp.torch_compat.dispatch import FakeTensorMode, OpOverload


def captured_values(graph: fx.Graph, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """Return the nodes' fake results for the inputs of one run.

    Args:
        graph: A backward as compiled autograd has captured it. Its first placeholder is the list of inputs.
        inputs: The inputs.
    Returns:
        Fake results by node. Nodes with unknown results are missing, for example those that compute with tensor
        subclasses.
    """
    first, *_ = graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Any] = {}
    with FakeTensorMode() as mode:
        for node in graph.find_nodes(op="call_function", target=operator.getitem):
            if node.args[0] is first and type(tensor := inputs[node.args[1]]) in (torch.Tensor, torch.nn.Parameter):
                values[node] = mode.from_tensor(tensor)
        for node in graph.nodes:
            if is_gradient_hook(node) and node.args[-1] in values:
                values[node] = values[node.args[-1]]
            elif node not in values and _is_known(node) and all(each in values for each in node.all_input_nodes):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    return values


def _is_known(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) or node.target is operator.getitem or may_hand_on(node.target)
