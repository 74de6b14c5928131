"""Which gradients a captured backward reduces without a copy of their own."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from compile_fsdp.ops import accumulate_gradient
from compile_fsdp.ops.call_block import call_block
from compile_fsdp.passes.dynamo.canonicalize_backward import canonicalize_backward
from compile_fsdp.torch_compat.autograd import compiled_autograd, compiled_autograd_function
from compile_fsdp.torch_compat.dispatch import chunk_cat

_Use = Callable[[fx.Graph, fx.Node], object]


@pytest.fixture(scope="module", autouse=True)
def _with_accumulation() -> None:
    """Let compiled autograd make its accumulation function, as in its first capture."""
    with compiled_autograd(lambda captured: captured, has_sizes=False):
        torch.zeros(2, requires_grad=True).sum().backward()


def _may_be_the_gradient(use: _Use, of_block: bool = True) -> bool:
    """Whether a gradient that `use` reads may be accumulated without a copy."""
    graph = fx.Graph()
    leaf, value = graph.placeholder("leaf"), graph.placeholder("value")
    results = graph.call_function(call_block if of_block else torch.unbind, ([value], [], "name"))
    gradient = graph.call_function(operator.getitem, (results, 0))
    target = compiled_autograd_function("AccumulateGrad")
    accumulated = graph.call_function(target, ([gradient], leaf, None, False))
    graph.output(use(graph, graph.call_function(operator.getitem, (accumulated, 0))))
    canonicalize_backward(graph, fake_mode=None)
    assert accumulated.target is accumulate_gradient
    return bool(accumulated.kwargs["is_only_copied"])


def _reduced(graph: fx.Graph, gradient: fx.Node) -> fx.Node:
    return graph.call_function(chunk_cat.default, ([gradient], 0, 2))


def _cast_and_reduced(graph: fx.Graph, gradient: fx.Node) -> fx.Node:
    return _reduced(graph, graph.call_method("to", (gradient, torch.float32)))


def _in_columns(graph: fx.Graph, gradient: fx.Node) -> fx.Node:
    columns = graph.call_method("chunk", (gradient, 2))
    return _reduced(graph, graph.call_function(torch.cat, ([graph.call_function(operator.getitem, (columns, 0))],)))


def _returned(graph: fx.Graph, gradient: fx.Node) -> tuple[fx.Node, fx.Node]:
    return gradient, _reduced(graph, gradient)


def _written(graph: fx.Graph, gradient: fx.Node) -> fx.Node:
    graph.call_method("mul_", (gradient, 2))
    return _reduced(graph, gradient)


@pytest.mark.parametrize("use", [_reduced, _cast_and_reduced, _in_columns, _returned, _written])
def test_gradient_of_a_block_is_copied_only_if_it_is_returned_or_written(use: _Use) -> None:
    assert _may_be_the_gradient(use) == (use not in (_returned, _written))


def test_gradient_of_a_single_op_is_copied() -> None:
    assert not _may_be_the_gradient(_reduced, of_block=False)


def test_gradient_is_copied_unless_its_layout_is_the_parameters() -> None:
    leaf, gradient, transposed = torch.zeros(2, 3, requires_grad=True), torch.rand(2, 3), torch.rand(3, 2).t()
    assert accumulate_gradient([gradient], leaf, None, False, is_only_copied=True)[0] is gradient
    (copied,) = accumulate_gradient([transposed], leaf, None, False, is_only_copied=True)
    assert copied is not None and copied.stride() == leaf.stride() and torch.equal(copied, transposed)
    (total,) = accumulate_gradient([gradient], leaf, torch.ones(2, 3), False, is_only_copied=True)
    assert total is not None and torch.equal(total, gradient + 1)
