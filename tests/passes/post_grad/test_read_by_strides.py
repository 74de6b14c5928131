"""Reads of convolution weights that Inductor would copy at the beginning of the graph."""

from __future__ import annotations

from expecttest import assert_expected_inline

from compile_fsdp.passes.post_grad.read_by_strides import read_by_strides
from helpers.graphs.build import GraphBuilder, aten
from helpers.graphs.render import render, render_calls


def test_weight_that_the_graph_fills_is_read_by_its_strides(build: GraphBuilder) -> None:
    build.input_like("rows", 3)
    x, value = build.input("x", (1, 1, 8, 8)), build.input("value", (1, 1, 3, 3))
    weight = build.input("weight", (1, 1, 3, 3))
    build.fill(weight, value)
    y = build.call(aten.convolution.default, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    graph = build.output(y, weight)
    assert dict(read_by_strides(graph).counts) == {"reads_rewritten": 1}
    graph.lint()
    assert_expected_inline(render_calls(graph), """\
resize_storage_bytes_(weight, 36)
copy_(weight, value)
%0: f32[1, 1, 3, 3] = as_strided(weight, [1, 1, 3, 3], [9, 9, 3, 1], 0)
%1: f32[1, 1, 8, 8] = convolution(x, %0, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
return (%1, weight)
""")
    assert dict(read_by_strides(graph).counts) == {"reads_rewritten": 0}


def test_matrices_and_unresized_inputs_are_read_directly(build: GraphBuilder) -> None:
    matrix, image = build.input("matrix", (3, 3)), build.input("image", (1, 1, 3, 3))
    build.full(matrix)
    graph = build.output(build.call(aten.relu.default, matrix), build.call(aten.relu.default, image))
    before = render(graph)
    assert dict(read_by_strides(graph).counts) == {"reads_rewritten": 0}
    assert render(graph) == before
