"""Views of a freed parameter are computed before it is freed; everything else stays."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from torch import fx

from compile_fsdp.ops import resize_storage_bytes_
from compile_fsdp.passes.partitioned.lift_views import lift_views
from helpers.graphs.build import GraphBuilder, aten
from helpers.graphs.render import render_calls


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
    assert_expected_inline(render_calls(graph), """\
%0: f32[2, 4, 4] = bmm(x, weight)
%1: f32[2, 4, 4] = transpose(weight, 1, 2)
%2: f32[4, 4] = select(%1, 0, 0)
resize_storage_bytes_(weight, 0)
%3: f32[2, 4, 4] = transpose(%0, 1, 2)
return (%0, %2, %3)
""")
    assert lift_views(graph) == 0


@pytest.mark.parametrize("case", ["the forward reads it", "its parameter is refilled"])
def test_a_view_stays(build: GraphBuilder, case: str) -> None:
    weight = build.input("weight", (4, 4))
    build.call(resize_storage_bytes_, weight, 0)
    if case == "its parameter is refilled":
        build.call(resize_storage_bytes_, weight, 64)
    view = build.call(aten.t.default, weight)
    graph = build.output(build.call(aten.neg.default, view) if case == "the forward reads it" else view)
    assert lift_views(graph) == 0
