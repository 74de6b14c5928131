"""Cut a block's backward in two, so that the next gather can be launched between both parts.

Precondition  the backward of a block, from AOTAutograd's partitioner
Rewrite       the first part ends with the gradient that completes three quarters of all parameter gradients' elements;
              views and sizes that both parts read are computed by both
Report        the parts: one if the second would make no gradient of a parameter

    before                                    after
    g = mul(grad_y, mask)                     g = mul(grad_y, mask)
    grad_v = mm(h_t, g)                       grad_v = mm(h_t, g)
    k = mm(g, v_t)                            return grad_v, g
    grad_w = mm(x_t, k)
    return grad_v, grad_w                     k = mm(g, v_t)
                                              grad_w = mm(x_t, k)
                                              return grad_w

A quarter of the block's compute is usually enough to hide a gather. All ranks cut at the same gradient, whatever their
batches: parameters have the same sizes on all ranks, and autograd makes their gradients in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from compile_fsdp.passes.analysis.aliases import fake_value, is_declared_view
from compile_fsdp.passes.analysis.collectives import numel
from compile_fsdp.passes.analysis.subgraphs import copy_ops, reached

_FIRST = 0.75  # share of the parameter gradients' elements that the first part makes


@dataclass(frozen=True, eq=False, slots=True)
class BackwardPart:
    """A part of a backward, as a graph of its own."""

    graph: fx.Graph
    inputs: list[fx.Node]  # nodes of the whole backward that it takes: its sizes, and then tensors
    results: list[fx.Node]  # nodes of the whole backward that it returns


def cut_backward(graph: fx.Graph, results: Sequence[fx.Node], gradients: Collection[fx.Node]) -> list[BackwardPart]:
    """Return the parts of a backward that returns these ops, each once; `gradients`: results for parameters."""
    inputs = graph.find_nodes(op="placeholder")
    ops = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    first = _first_ops(ops, gradients)
    if all(node in first for node in gradients):
        return [_part(inputs, ops, results)]
    needed = reached([node for node in ops if node not in first], _run_again)
    second = [node for node in ops if node in needed]
    read = {each for node in second for each in node.all_input_nodes}
    crossing = [node for node in first if node in read and node not in needed]
    early = dict.fromkeys([*(node for node in results if node in first), *crossing])
    late = [node for node in results if node not in first]
    return [_part(inputs, first, early), _part([*inputs, *crossing], second, late)]


def _first_ops(ops: Sequence[fx.Node], gradients: Collection[fx.Node]) -> dict[fx.Node, None]:
    missing = _FIRST * sum(map(numel, gradients))
    first: dict[fx.Node, None] = {}
    for node in ops:
        if missing > 0 or (node.target is operator.getitem and node.args[0] in first):
            first[node] = None
        missing -= numel(node) if node in gradients else 0
    return first


def _run_again(reader: fx.Node) -> list[fx.Node]:
    """Return the views and sizes that a node reads; the second part computes those of the first part again."""
    return [n for n in reader.all_input_nodes if isinstance(fake_value(n), torch.SymInt) or is_declared_view(n)]


def _part(inputs: Sequence[fx.Node], ops: Collection[fx.Node], results: Collection[fx.Node]) -> BackwardPart:
    read = {each for node in ops for each in node.all_input_nodes}.union(results)
    taken = [node for node in inputs if node in read or isinstance(fake_value(node), torch.SymInt)]
    return BackwardPart(copy_ops(taken, ops, results), taken, list(results))
