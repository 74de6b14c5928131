"""The gather and free of a module move out of a checkpoint around its call."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from compile_fsdp.passes.dynamo.drop_input_aliases import ALIAS
from compile_fsdp.passes.dynamo.open_checkpoints import open_checkpoints
from compile_fsdp.torch_compat.autograd import set_grad_enabled
from helpers.graphs.build import CHECKPOINT, GraphBuilder
from helpers.graphs.render import render, render_calls


def gather(shard: torch.Tensor) -> torch.Tensor:
    return torch.cat([shard, shard])


def fill(weight: torch.Tensor, value: torch.Tensor) -> None:
    """Fill a parameter."""


def free(weight: torch.Tensor) -> None:
    """Free a parameter."""


Body = Callable[[GraphBuilder, fx.Node, fx.Node, fx.Node], fx.Node]


def _switch(build: GraphBuilder, records: bool) -> None:
    build.graph.call_function(set_grad_enabled, (records,))


def _gather(build: GraphBuilder, shard: fx.Node, weight: fx.Node) -> None:
    _switch(build, False)
    gathered = build.call(gather, shard)
    _switch(build, True)
    _switch(build, False)
    build.call(fill, weight, gathered)
    _switch(build, True)


def _module(build: GraphBuilder, shard: fx.Node, weight: fx.Node, x: fx.Node) -> fx.Node:
    """Call one sharded module, which casts its input before the gather."""
    x = build.call(torch.neg, x)
    _gather(build, shard, weight)
    result = build.call(torch.matmul, x, weight)
    build.call(free, weight)
    return result


def _module_with_aliases(build: GraphBuilder, shard: fx.Node, weight: fx.Node, x: fx.Node) -> fx.Node:
    """Call one sharded module, which casts its input to the same dtype and reads it by an alias."""
    x = build.call_method("to", x, torch.float32)
    _gather(build, shard, weight)
    x = build.call(ALIAS, x)
    result = build.call(torch.matmul, x, build.call(torch.mul, x, weight))
    build.call(free, weight)
    return result


def _reads_what_was_gathered(build: GraphBuilder, shard: fx.Node, weight: fx.Node, x: fx.Node) -> fx.Node:
    gathered = build.call(gather, shard)
    build.call(fill, weight, gathered)
    return build.call(torch.matmul, x, gathered)


def _writes_more(build: GraphBuilder, shard: fx.Node, weight: fx.Node, x: fx.Node) -> fx.Node:
    result = _module(build, shard, weight, x)
    build.copy(x, result)
    return result


def _graph(body_of: Body, calls: int = 1) -> fx.Graph:
    build = GraphBuilder(meta_key="example_value")
    inputs = [build.input("shard", (2, 4)), build.input("weight", (4, 4)), build.input("x", (4, 4))]
    body = GraphBuilder(meta_key="example_value", fake_mode=build.fake_mode)
    last = body_of(body, *(body.input_like(f"inner_{node.name}", build.value(node)) for node in inputs))
    attribute = build.subgraph("body", body.output_module(last))
    result = build.value(inputs[-1])
    called = [build.call_opaque(CHECKPOINT, attribute, *inputs, value=(result,)) for _ in range(calls)]
    return build.output(build.call(torch.neg, build.call(operator.getitem, called[-1], 0)))


def test_what_the_runtime_adds_moves_around_the_checkpoint() -> None:
    graph = _graph(_module)
    open_checkpoints(graph, {gather, fill, free}, free)
    graph.lint()
    assert_expected_inline(render(graph), """\
shard: f32[2, 4]
weight: f32[4, 4]
x: f32[4, 4]
_set_grad_enabled(False)
%0: f32[4, 4] = gather(shard)
fill(weight, %0)
_set_grad_enabled(True)
%1 = tag_activation_checkpoint(body, weight, x)
%2: f32[4, 4] = getitem(%1, 0)
free(weight)
%3: f32[4, 4] = neg(%2)
return (%3,)
body:
  inner_weight: f32[4, 4]
  inner_x: f32[4, 4]
  %0: f32[4, 4] = neg(inner_x)
  %1: f32[4, 4] = matmul(%0, inner_weight)
  return (%1,)
""")


def test_alias_of_an_input_moves_behind_the_gather() -> None:
    graph = _graph(_module_with_aliases)
    open_checkpoints(graph, {gather, fill, free}, free)
    graph.lint()
    assert_expected_inline(render_calls(graph), """\
_set_grad_enabled(False)
%0: f32[4, 4] = gather(shard)
fill(weight, %0)
_set_grad_enabled(True)
%1: f32[4, 4] = alias(x)
%2 = tag_activation_checkpoint(body, weight, %1)
%3: f32[4, 4] = getitem(%2, 0)
free(weight)
%4: f32[4, 4] = neg(%3)
return (%4,)
body:
  %0: f32[4, 4] = .to(inner_x, torch.float32)
  %1: f32[4, 4] = mul(%0, inner_weight)
  %2: f32[4, 4] = matmul(%0, %1)
  return (%2,)
""")


def test_autograd_stays_off_around_a_checkpoint_that_it_does_not_record() -> None:
    with torch.no_grad():
        graph = _graph(_module)
        open_checkpoints(graph, {gather, fill, free}, free)
    assert "_set_grad_enabled" not in render(graph).split("body")[0]


@pytest.mark.parametrize(
    "body_of",
    [
        lambda build, shard, weight, x: _module(build, shard, weight, build.call(torch.matmul, x, weight)),
        lambda build, shard, weight, x: build.call(torch.matmul, _module(build, shard, weight, x), weight),
        lambda build, shard, weight, x: _module(build, shard, weight, _module(build, shard, weight, x)),
        lambda build, shard, weight, x: _module(build, build.call(torch.neg, shard), weight, x),
        *(_reads_what_was_gathered, _writes_more),
    ],
    ids=[
        *("reads before", "reads after", "gathers twice", "gathers a result"),
        *("reads what was gathered", "writes more"),
    ],
)
def test_body_of_any_other_form_stays(body_of: Body) -> None:
    graph = _graph(body_of)
    before = render(graph)
    open_checkpoints(graph, {gather, fill, free}, free)
    assert render(graph) == before


def test_body_that_two_checkpoints_run_stays() -> None:
    graph = _graph(_module, calls=2)
    before = render(graph)
    open_checkpoints(graph, {gather, fill, free}, free)
    assert render(graph) == before
