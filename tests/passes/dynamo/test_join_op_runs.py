"""Neighbouring plain ops become one call with equal results; ops with effects stay apart."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import fx

from compile_fsdp.passes.dynamo.join_op_runs import join_op_runs

_aten = torch.ops.aten


def _hook(grad: torch.Tensor) -> torch.Tensor:
    return grad * 2


def _captured(build: Callable[[fx.Graph, fx.Node, fx.Node, fx.Node], Any]) -> fx.GraphModule:
    """A graph with the inputs of a captured backward, two of them tensors."""
    graph = fx.Graph()
    inputs, sizes = graph.placeholder("inputs"), graph.placeholder("sizes")
    x, y = (graph.call_function(operator.getitem, (inputs, i)) for i in range(2))
    graph.output(build(graph, x, y, sizes))
    return fx.GraphModule({}, graph)


def _joined(captured: fx.GraphModule) -> str:
    """The calls of the graph after joining, which changes no result."""
    inputs = [torch.randn(3, 3), torch.randn(3, 3)]
    expected = captured([each.clone() for each in inputs], [3])
    functions = join_op_runs(captured.graph)
    captured.graph.lint()
    captured.recompile()
    found = captured([each.clone() for each in inputs], [3])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    calls = [node for node in captured.graph.nodes if node.op == "call_function"]
    assert functions == {node.target for node in calls if node.name.startswith("run_of_ops")}
    return "\n".join(f"{node} = {getattr(node.target, '__name__', node.target)}{node.args}" for node in calls)


def test_runs_end_at_hooks() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node, sizes: fx.Node) -> Any:
        product = graph.call_function(_aten.mm.default, (x, y))
        scale = graph.call_function(_aten.full.default, ([3], 2.0))
        scaled = graph.call_function(_aten.mul.Tensor, (product, scale))
        turned = graph.call_function(_aten.permute.default, (scaled, [1, 0]))
        hooked = graph.call_function(_hook, (turned,))
        parts = graph.call_function(_aten.split.Tensor, (hooked, 2))
        first = graph.call_function(operator.getitem, (parts, 0))
        total = graph.call_function(_aten.sum.default, (first,))
        return total, scaled

    assert_expected_inline(_joined(_captured(build)), """\
getitem = getitem(inputs, 0)
getitem_1 = getitem(inputs, 1)
full_default = full.default([3], 2.0)
run_of_ops = run_of_ops(getitem, getitem_1, full_default)
getitem_3 = getitem(run_of_ops, 0)
getitem_4 = getitem(run_of_ops, 1)
_hook = _hook(getitem_4,)
run_of_ops_1 = run_of_ops(_hook,)
getitem_5 = getitem(run_of_ops_1, 0)""")


def test_in_place_op_is_not_joined() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node, sizes: fx.Node) -> Any:
        negative = graph.call_function(_aten.neg.default, (x,))
        graph.call_function(_aten.add_.Tensor, (x, y))
        cosine = graph.call_function(_aten.cos.default, (x,))
        return graph.call_function(_aten.add.Tensor, (negative, cosine))

    assert "run_of_ops" not in _joined(_captured(build))


def test_split_whose_items_are_read_behind_a_hook_is_not_joined() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node, sizes: fx.Node) -> Any:
        added = graph.call_function(_aten.add.Tensor, (x, y))
        turned = graph.call_function(_aten.permute.default, (added, [1, 0]))
        parts = graph.call_function(_aten.split.Tensor, (turned, 2))
        hooked = graph.call_function(_hook, (turned,))
        return hooked, graph.call_function(operator.getitem, (parts, 0))

    assert "run_of_ops" not in _joined(_captured(build))


def test_ops_of_unknown_sizes_are_not_joined() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node, sizes: fx.Node) -> Any:
        added = graph.call_function(_aten.add.Tensor, (x, y))
        found = graph.call_function(_aten.nonzero.default, (added,))
        return graph.call_function(_aten.sum.default, (found,))

    assert "run_of_ops" not in _joined(_captured(build))


def test_ops_of_symbolic_sizes_are_not_joined() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node, sizes: fx.Node) -> Any:
        size = graph.call_function(operator.getitem, (sizes, 0))
        wide = graph.call_function(_aten.reshape.default, (x, [size, 3]))
        added = graph.call_function(_aten.add.Tensor, (wide, y))
        return graph.call_function(_aten.sum.default, (added,))

    assert "run_of_ops" not in _joined(_captured(build))
