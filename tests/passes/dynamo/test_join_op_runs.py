"""Neighbouring plain ops become one call with equal results; ops with effects stay apart."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from compile_fsdp.passes.dynamo.join_op_runs import join_op_runs

_aten = torch.ops.aten


def _hook(grad: torch.Tensor) -> torch.Tensor:
    return grad * 2


Call = Callable[..., fx.Node]
Build = Callable[[Call, fx.Node, fx.Node, fx.Node], Any]


def _captured(build: Build) -> fx.GraphModule:
    """A graph with the inputs of a captured backward, two of them tensors."""
    graph = fx.Graph()
    inputs, sizes = graph.placeholder("inputs"), graph.placeholder("sizes")

    def call(target: Callable[..., Any], *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    x, y = (call(operator.getitem, inputs, i) for i in range(2))
    graph.output(build(call, x, y, sizes))
    return fx.GraphModule({}, graph)


def _joined(captured: fx.GraphModule) -> str:
    """The calls of the graph after joining, which changes no result."""
    inputs = [torch.randn(3, 3), torch.randn(3, 3)]
    torch.manual_seed(0)
    expected = captured([each.clone() for each in inputs], [3])
    functions = join_op_runs(captured.graph)
    captured.graph.lint()
    captured.recompile()
    torch.manual_seed(0)
    found = captured([each.clone() for each in inputs], [3])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    calls = [node for node in captured.graph.nodes if node.op == "call_function"]
    assert functions == {node.target for node in calls if node.name.startswith("run_of_ops")}
    return "\n".join(f"{node} = {getattr(node.target, '__name__', node.target)}{node.args}" for node in calls)


def test_runs_end_at_hooks() -> None:
    def build(call: Call, x: fx.Node, y: fx.Node, sizes: fx.Node) -> Any:
        product = call(_aten.mm.default, x, y)
        scale = call(_aten.full.default, [3], 2.0)
        scaled = call(_aten.mul.Tensor, product, scale)
        hooked = call(_hook, call(_aten.permute.default, scaled, [1, 0]))
        first = call(operator.getitem, call(_aten.split.Tensor, hooked, 2), 0)
        return call(_aten.sum.default, first), scaled

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


def _with_a_write(call: Call, x: fx.Node, y: fx.Node, sizes: fx.Node) -> Any:
    negative = call(_aten.neg.default, x)
    call(_aten.add_.Tensor, x, y)
    return call(_aten.add.Tensor, negative, call(_aten.cos.default, x))


def _with_items_read_behind_a_hook(call: Call, x: fx.Node, y: fx.Node, sizes: fx.Node) -> Any:
    turned = call(_aten.permute.default, call(_aten.add.Tensor, x, y), [1, 0])
    parts = call(_aten.split.Tensor, turned, 2)
    return call(_hook, turned), call(operator.getitem, parts, 0)


def _of_unknown_sizes(call: Call, x: fx.Node, y: fx.Node, sizes: fx.Node) -> Any:
    return call(_aten.sum.default, call(_aten.nonzero.default, call(_aten.add.Tensor, x, y)))


def _of_random_numbers(call: Call, x: fx.Node, y: fx.Node, sizes: fx.Node) -> Any:
    draws = call(_aten.bernoulli.default, call(_aten.sigmoid.default, x))
    return call(_aten.add.Tensor, draws, call(_aten.rand.default, [3, 3]))


def _of_symbolic_sizes(call: Call, x: fx.Node, y: fx.Node, sizes: fx.Node) -> Any:
    wide = call(_aten.reshape.default, x, [call(operator.getitem, sizes, 0), 3])
    return call(_aten.sum.default, call(_aten.add.Tensor, wide, y))


@pytest.mark.parametrize(
    "build",
    [_with_a_write, _with_items_read_behind_a_hook, _of_unknown_sizes, _of_random_numbers, _of_symbolic_sizes],
)
def test_ops_are_not_joined(build: Build) -> None:
    assert "run_of_ops" not in _joined(_captured(build))
