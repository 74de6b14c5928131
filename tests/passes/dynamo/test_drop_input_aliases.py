"""Aliases of module inputs stay where they change gradients or hooks."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from compile_fsdp.ops import watch
from compile_fsdp.passes.dynamo.drop_input_aliases import ALIAS, drop_input_aliases
from helpers.graphs.build import CHECKPOINT, GraphBuilder, Layer


def _inputs_of(layer: Layer, node: fx.Node, *results: fx.Node) -> list[fx.Node]:
    """Run the pass on a graph with results, by default the node; return the inputs of the node."""
    graph = layer.build.output(*(results or [node]))
    drop_input_aliases(graph)
    return node.all_input_nodes


@pytest.mark.parametrize("modules", [1, 2])
def test_aliases_of_nested_modules_that_alone_read_their_tensor_go(layer: Layer, modules: int) -> None:
    alias = layer.build.chain(layer.x, *[ALIAS] * modules)
    result = layer.build.call(torch.mul, alias, alias)
    assert _inputs_of(layer, result) == [layer.x]


def _deferred_hook() -> Callable[..., object]:
    """Return a function by which Dynamo registers a hook in a graph."""
    name, hook_name = "register_hook", "hook0"

    def _register_hook_trampoline(tensor: torch.Tensor, hooks: object) -> tuple[str, str]:
        return name, hook_name

    return _register_hook_trampoline


@pytest.mark.parametrize("hook", [watch, _deferred_hook()], ids=["lifted", "in the graph"])
def test_alias_of_a_tensor_with_a_hook_goes(layer: Layer, hook: Callable[..., object]) -> None:
    layer.build.call_opaque(hook, layer.x, 0)
    result = layer.build.call(torch.sin, layer.build.call(ALIAS, layer.x))
    assert _inputs_of(layer, result) == [layer.x]


@pytest.mark.parametrize("is_cast", [False, True], ids=["", "by another name"])
def test_alias_of_a_tensor_that_others_read_stays(layer: Layer, is_cast: bool) -> None:
    tensor = layer.build.call_method("to", layer.x, torch.float32) if is_cast else layer.x
    alias = layer.build.call(ALIAS, tensor)
    result = layer.build.call(torch.mul, alias, alias)
    assert _inputs_of(layer, result, layer.build.call(torch.add, layer.x, result)) == [alias]


def test_alias_with_a_hook_stays(layer: Layer) -> None:
    alias = layer.build.call(ALIAS, layer.x)
    layer.build.call_opaque(watch, alias, 0)
    result = layer.build.call(torch.sin, alias)
    assert _inputs_of(layer, result) == [alias]


def test_alias_that_is_returned_stays(layer: Layer) -> None:
    alias = layer.build.call(ALIAS, layer.x)
    graph = layer.build.output(alias)
    drop_input_aliases(graph)
    assert graph.output_node().all_input_nodes == [alias]


def test_alias_that_is_written_stays(layer: Layer) -> None:
    result = layer.build.call_method("sin_", layer.build.call(ALIAS, layer.x))
    (alias,) = _inputs_of(layer, result)
    assert alias.target is ALIAS


def test_alias_of_a_parameter_that_is_filled_and_freed_goes(layer: Layer) -> None:
    layer.fill()
    result = layer.build.call(torch.sin, layer.build.call(ALIAS, layer.weight))
    layer.free()
    assert _inputs_of(layer, result) == [layer.weight]


def test_aliases_in_a_checkpoint_go_if_they_are_not_of_its_inputs(layer: Layer) -> None:
    build = layer.build
    body = GraphBuilder(meta_key="example_value", fake_mode=build.fake_mode)
    x, value = (body.input_like(f"inner_{node.name}", build.value(node)) for node in (layer.x, layer.value))
    own, other = body.call(ALIAS, x), body.call(torch.neg, value)
    result = body.call(torch.mul, own, body.call(ALIAS, other))
    attribute = build.subgraph("body", body.output_module(result))
    called = build.call_opaque(CHECKPOINT, attribute, layer.x, layer.value, value=(build.value(layer.x),))
    build.output(build.call(operator.getitem, called, 0))
    drop_input_aliases(called.graph)
    assert result.all_input_nodes == [own, other]
