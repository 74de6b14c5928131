"""Full backward hooks of a module without differentiable inputs are called like pre-hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from compile_fsdp.passes.dynamo.keep_module_hooks import keep_module_hooks


def _in_graph_bw_hooks(state: Any) -> Any:  # named like Dynamo's function
    raise NotImplementedError


@pytest.mark.parametrize(("needs_gradient", "kept"), [([False, False], True), ([False, True], False), ([], True)])
def test_hooks_are_kept_if_no_input_needs_a_gradient(needs_gradient: list[bool], kept: bool) -> None:
    graph = fx.Graph()
    state, inputs = graph.placeholder("state"), [graph.placeholder(f"x{i}") for i in range(len(needs_gradient))]
    for node, needs in zip(inputs, needs_gradient, strict=True):
        node.meta["example_value"] = torch.ones(2, requires_grad=needs)
    hooks = graph.call_function(_in_graph_bw_hooks, (state,))
    graph.call_method("setup_input_hook", (hooks, (*inputs, 3, graph.placeholder("size"))))
    graph.call_method("setup_output_hook", (hooks, state))
    keep_module_hooks(graph)
    target = hooks.target
    assert (target is not _in_graph_bw_hooks) == kept
    keep_module_hooks(graph)
    assert hooks.target is target


def test_methods_of_other_objects_stay() -> None:
    graph = fx.Graph()
    mine = graph.placeholder("mine")
    graph.call_method("setup_input_hook", (mine, ()))
    keep_module_hooks(graph)
    assert mine.target == "mine"
