"""Writes, order and upkeep of nodes, by their schemas and, before AOTAutograd, by their names."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compile_fsdp.ops import copy_, resize_storage_bytes_, run_block
from compile_fsdp.passes.analysis.eager_effects import EagerEffects, is_grad_switch, is_passed_through, is_upkeep
from compile_fsdp.passes.analysis.effects import Effects, get_argument
from compile_fsdp.torch_compat.dynamo import set_version_counter, tensor_version
from helpers.graphs.build import GraphBuilder, aten, c10d

functional = torch.nn.functional
higher_order = torch.ops.higher_order


def somebodys(*args: object) -> None:
    pass


def call_aot_bwd_prologue(*args: object) -> None:
    pass


def names(nodes: Any) -> set[str]:
    return {node.name for node in nodes}


def call(target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
    """A call on inputs x, y and z, which are given by name."""
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in "xyz"}
    args, kwargs = fx.node.map_aggregate((args, kwargs), lambda a: inputs.get(a, a) if isinstance(a, str) else a)
    if isinstance(target, str):
        return graph.call_method(target, args, kwargs)
    return graph.call_function(target, args, kwargs)


def call_module(*args: str) -> fx.Node:
    graph = fx.Graph()
    return graph.call_module("layer_", tuple(map(graph.placeholder, args)))


@pytest.mark.parametrize(
    ("node", "written"),
    [
        (call(torch.matmul, "x", "y"), ""),
        (call(torch.Tensor.mul, "x", "y"), ""),
        (call(len, "x"), ""),
        (call("mul", "x", "y"), ""),
        (call("mul_", "x", "y"), "x"),
        (call("__add__", "x", "y"), ""),
        (call("__setitem__", "x", 0, "y"), "x"),
        (call(operator.iadd, "x", "y"), "x"),
        (call(operator.add, "x", "y"), ""),
        (call(torch.add, "x", "y", out="z"), "z"),
        (call(run_block, "name", 0, "x", "y"), ""),
        (call(functional.relu, "x", inplace=True), "x"),
        (call("relu", "x", inplace=True), "x"),
        (call(functional.relu, "x", True), "x"),
        (call(functional.relu, "x", False), ""),
        (call(functional.dropout, "x", 0.1, True, False), ""),
        (call(functional.dropout, "x", 0.1, True, True), "x"),
        (call(torch.sum, "x", 0, True), ""),
        (call(functional.batch_norm, "x", "y", "z"), "xyz"),
        (call(torch.distributed.broadcast, "x", 0), "x"),
        (call(somebodys, "x", "y"), "xy"),
        (call_module("x", "y"), "xy"),
        (call(tensor_version, "x"), ""),
        (call(set_version_counter, ("x",), (1,)), ""),
        (call(aten.add.Tensor, "x", "y"), ""),
        (call(aten.add, "x", "y"), ""),
        (call(aten.add_, "x", "y"), "x"),
        (call(aten.add_.Tensor, "x", "y"), "x"),
        (call(aten.add_.Tensor, other="y", self="x"), "x"),
        (call(aten.add.out, "x", "y", out="z"), "z"),
        (call(higher_order.auto_functionalized, aten.add_.Tensor, "x", "y"), ""),
        (call(higher_order.wrap_activation_checkpoint, aten.add.Tensor, "x", "y"), ""),
        (call(higher_order.wrap_activation_checkpoint, aten.add_.Tensor, "x", "y"), "xy"),
        (call(higher_order.wrap_activation_checkpoint, aten.add.Tensor, "x", "y", hook=aten.add_.Tensor), "xy"),
        (call(higher_order.wrap_activation_checkpoint, aten.add, "x", "y"), "xy"),
        (call(higher_order.wrap_activation_checkpoint, aten.relu.default, aten.add_, "x"), "x"),
        (call(higher_order.wrap_activation_checkpoint, "x", "y"), "xy"),
    ],
    ids=str,
)
def test_written_inputs(node: fx.Node, written: str) -> None:
    assert names(EagerEffects(None).written_inputs(node)) == set(written)


def test_computation_with_sizes_writes_nothing() -> None:
    # Else no collectives would share a pack across it, and ranks with changing sizes would have other packs.
    graph = fx.Graph()
    size, x = graph.placeholder("size"), graph.placeholder("x")
    size.meta["val"], x.meta["val"] = ShapeEnv().create_unbacked_symint(), torch.ones(2)
    effects = Effects(None)
    assert not effects.written_inputs(graph.call_function(operator.mul, (size, 3)))
    assert effects.written_inputs(graph.call_function(somebodys, (size, x))) == [x]


@pytest.mark.parametrize(
    ("node", "is_ordered"),
    [
        (call(torch.matmul, "x", "y"), False),
        (call(torch.rand_like, "x"), True),
        (call("bernoulli_", "x"), True),
        (call(len, "x"), False),
        (call(somebodys, "x"), True),
        (call_module("x"), True),
        (call(tensor_version, "x"), False),
        (call(set_version_counter, ("x",), (1,)), False),
        (call(aten.relu.default, "x"), False),
        (call(aten.rand_like.default, "x"), True),
        (call(aten.relu, "x"), False),
        (call(aten.rand_like, "x"), True),
        (call(torch.relu, "x").args[0], False),
    ],
    ids=str,
)
def test_random_ops_and_unknown_functions_are_ordered(node: fx.Node, is_ordered: bool) -> None:
    assert EagerEffects(None).is_ordered(node) == is_ordered


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (call(resize_storage_bytes_, "x", 0), True),
        (call(copy_, "x", "y"), True),
        (call(tensor_version, "x"), True),
        (call(set_version_counter, ("x",), (1,)), True),
        (call(aten.copy_.default, "x", "y"), False),
        (call(torch.relu, "x"), False),
    ],
    ids=str,
)
def test_fills_frees_and_version_counters_are_upkeep(node: fx.Node, expected: bool) -> None:
    assert is_upkeep(node) == expected


def test_inputs_items_and_prologue_are_passed_through() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    item = graph.call_function(operator.getitem, (x, 0))
    prologue = graph.call_function(call_aot_bwd_prologue, (x,))
    first = graph.call_function(operator.getitem, (prologue, 0))
    relu = graph.call_function(torch.relu, (x,))
    part = graph.call_function(operator.getitem, (relu, 0))
    constant = graph.call_function(operator.getitem, ((1, 2), 0))
    assert [is_passed_through(node) for node in (x, item, prologue, first)] == [True] * 4
    assert [is_passed_through(node) for node in (relu, part, constant)] == [False] * 3


def test_argument_is_found_by_position_and_by_keyword() -> None:
    assert get_argument(call(resize_storage_bytes_, "x", 4), 1, "new_size") == 4
    assert get_argument(call(resize_storage_bytes_, "x", new_size=4), 1, "new_size") == 4


def test_output_and_resize_have_no_result() -> None:
    graph = fx.Graph()
    assert not Effects(None).has_result(graph.output(graph.placeholder("x")))
    assert not Effects(None).has_result(call(resize_storage_bytes_.overloadpacket, "x", 0))


@pytest.mark.parametrize("reads", [False, True])
def test_subgraph_reads_storages_if_one_of_its_ops_does(build: GraphBuilder, reads: bool) -> None:
    body = GraphBuilder(fake_mode=build.fake_mode)
    inner = body.input("x", (4, 4))
    view = body.call(aten.as_strided.default, inner, [2], [1]) if reads else body.call(aten.t.default, inner)
    region = build.subgraph("region", body.output_module(view))
    build.call_opaque(higher_order.wrap_activation_checkpoint, region, build.input("x", (4, 4)))
    module = build.output_module()
    (node,) = (node for node in module.graph.nodes if node.target is higher_order.wrap_activation_checkpoint)
    assert Effects(module).reads_storage(node) == reads
    assert Effects(None).reads_storage(call(higher_order.auto_functionalized_v2, aten.add_.Tensor, "x"))


def test_only_aten_ops_that_write_nothing_only_compute() -> None:
    targets = (aten.neg.default, aten.neg_.default, c10d.wait_tensor.default, torch.neg)
    assert [Effects(None).only_computes(call(target, "x")) for target in targets] == [True, False, False, False]


def test_input_named_like_a_switch_is_no_switch() -> None:
    assert is_grad_switch(fx.Graph().call_function(torch._C._set_grad_enabled, (True,)))
    assert not is_grad_switch(fx.Graph().placeholder("_set_grad_enabled"))
