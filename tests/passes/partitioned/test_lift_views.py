"""Views of a freed parameter are computed before it is freed; everything else stays."""

from __future__ import annotations

from expecttest import assert_expected_inline
from torch import fx

from compile_fsdp.ops import resize_storage_bytes_
from compile_fsdp.passes.partitioned.lift_views import lift_views
from helpers.graphs.build import GraphBuilder, aten
from helpers.graphs.render import render


def _forward() -> fx.Graph:
    """A product with a batched weight; after the free, two views of the weight and one of the product."""
    build = GraphBuilder()
    x, weight = build.input("x", (2, 4, 4)), build.input("weight", (2, 4, 4))
    product = build.call(aten.bmm.default, x, weight)
    build.call(resize_storage_bytes_, weight, 0)
    transposed = build.call(aten.transpose.int, weight, 1, 2)
    row = build.call(aten.select.int, transposed, 0, 0)
    turned = build.call(aten.transpose.int, product, 1, 2)
    return build.output(product, row, turned)


def test_views_move_before_the_free() -> None:
    graph = _forward()
    assert lift_views(graph) == 2
    graph.lint()
    assert_expected_inline(render(graph), """\
x: f32[2, 4, 4]
weight: f32[2, 4, 4]
%0: f32[2, 4, 4] = bmm(x, weight)
%1: f32[2, 4, 4] = transpose(weight, 1, 2)
%2: f32[4, 4] = select(%1, 0, 0)
resize_storage_bytes_(weight, 0)
%3: f32[2, 4, 4] = transpose(%0, 1, 2)
return (%0, %2, %3)
""")
    assert lift_views(graph) == 0


def test_a_view_that_the_forward_reads_stays(build: GraphBuilder) -> None:
    x, weight = build.input("x", (4, 4)), build.input("weight", (4, 4))
    build.call(resize_storage_bytes_, weight, 0)
    graph = build.output(build.call(aten.mm.default, x, build.call(aten.t.default, weight)))
    assert lift_views(graph) == 0


def test_a_view_of_a_refilled_parameter_stays(build: GraphBuilder) -> None:
    weight = build.input("weight", (4, 4))
    build.call(resize_storage_bytes_, weight, 0)
    build.call(resize_storage_bytes_, weight, 64)
    graph = build.output(build.call(aten.t.default, weight))
    assert lift_views(graph) == 0
