"""Find how the sizes that a block's backward takes are computed from what its forward takes.

A size may be an input of the block, or be read from the shape of a tensor among its inputs and computed with.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from compile_fsdp.passes.analysis.aliases import fake_value
from compile_fsdp.passes.analysis.subgraphs import reached


def saved_sizes(forward: fx.Graph, names: Collection[str]) -> fx.Graph | None:
    """Return a graph with the inputs of `forward` that returns its sizes of these names, in this order.

    None if one of them depends on more than sizes and shapes of the inputs, such as on values.
    """
    by_name = {node.name: node for node in forward.nodes}
    needed = reached([by_name[name] for name in names], lambda node: node.all_input_nodes)
    if any(isinstance(fake_value(node), torch.Tensor) and node.op != "placeholder" for node in needed):
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in forward.nodes:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(node.name)
        elif node in needed:
            copies[node] = _copy(node, graph, copies)
    graph.output(tuple(copies[by_name[name]] for name in names))
    return graph


def _copy(node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    method = _METHODS.get(node.target)
    if method is None:
        return graph.node_copy(node, copies.__getitem__)
    tensor, *rest = node.args  # The method also works where AOTAutograd traces a call of the block.
    assert isinstance(tensor, fx.Node)
    return graph.call_method(method, (copies[tensor], *rest))


_METHODS: dict[Any, str] = {
    torch.ops.aten.sym_size.int: "size",
    torch.ops.aten.sym_stride.int: "stride",
    torch.ops.aten.sym_numel.default: "numel",
}
