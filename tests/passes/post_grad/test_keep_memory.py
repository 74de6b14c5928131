"""Parameters that stay allocated for a device graph."""

from __future__ import annotations

from expecttest import assert_expected_inline

from compile_fsdp.passes.post_grad.keep_memory import keep_memory
from helpers.graphs.build import GraphBuilder, aten
from helpers.graphs.render import render


def test_resizes_go_and_fills_stay() -> None:
    build = GraphBuilder()
    build.input_like("rows", 3)
    x, value = build.input("x", (3, 3)), build.input("value", (3, 3))
    weight, earlier = build.input("weight", (3, 3)), build.input("earlier", (3, 3))
    build.fill(weight, value)
    y = build.call(aten.mm.default, x, weight)
    z = build.call(aten.mm.default, y, earlier)
    build.free(earlier)
    graph = build.output(z)
    assert dict(keep_memory(graph).counts) == {"resizes_erased": 2}
    graph.lint()
    assert_expected_inline(render(graph), """\
rows
x: f32[3, 3]
value: f32[3, 3]
weight: f32[3, 3]
earlier: f32[3, 3]
copy_(weight, value)
%0: f32[3, 3] = mm(x, weight)
%1: f32[3, 3] = mm(%0, earlier)
return (%1,)
""")
    assert dict(keep_memory(graph).counts) == {"resizes_erased": 0}
