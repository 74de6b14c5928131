"""Sizes that a block's backward takes are computed from what the forward takes."""

from __future__ import annotations

import operator

import torch
from expecttest import assert_expected_inline
from torch import fx

from compile_fsdp.passes.partitioned.saved_sizes import saved_sizes
from helpers.graphs.build import GraphBuilder, aten
from helpers.graphs.render import render


def _forward(build: GraphBuilder) -> tuple[fx.Graph, dict[str, fx.Node]]:
    given = build.size("given")
    x = build.input("x", (build.value(given), 4))
    length = build.call(aten.sym_size.int, x, 0)
    product = build.call(operator.mul, length, 3)
    result = build.call(aten.sin.default, x)
    inner = build.call(aten.sym_size.int, result, 0)
    nodes = {"given": given, "length": length, "product": product, "inner": inner}
    return build.output(result, given, product, inner), nodes


def test_sizes_come_from_sizes_and_shapes_of_inputs(build: GraphBuilder) -> None:
    graph, nodes = _forward(build)
    sizes = saved_sizes(graph, [nodes["product"].name, nodes["given"].name])
    assert sizes is not None
    assert_expected_inline(render(sizes), """\
given
x
%0 = .size(x, 0)
%1: 3*u0 = mul(%0, 3)
return (%1, given)
""")
    assert fx.GraphModule({}, sizes)(5, torch.ones(7, 4)) == (21, 5)


def test_size_of_a_result_is_not_known_before_the_block_runs(build: GraphBuilder) -> None:
    graph, nodes = _forward(build)
    assert saved_sizes(graph, [nodes["inner"].name]) is None


def test_block_that_saves_no_size_needs_none(build: GraphBuilder) -> None:
    graph, _ = _forward(build)
    sizes = saved_sizes(graph, [])
    assert sizes is not None
    assert fx.GraphModule({}, sizes)(5, torch.ones(7, 4)) == ()
