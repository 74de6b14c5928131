"""Parameters that stay allocated for a device graph."""

from __future__ import annotations

from expecttest import assert_expected_inline

from compile_fsdp.passes.post_grad.make_replayable import make_replayable
from helpers.graphs.build import GraphBuilder, aten, c10d
from helpers.graphs.render import render_calls


def test_resizes_go_and_fills_stay(build: GraphBuilder) -> None:
    build.input_like("rows", 3)
    x, value = build.input("x", (3, 3)), build.input("value", (3, 3))
    weight, earlier = build.input("weight", (3, 3)), build.input("earlier", (3, 3))
    build.fill(weight, value)
    y = build.call(aten.mm.default, x, weight)
    z = build.call(aten.mm.default, y, earlier)
    build.free(earlier)
    graph = build.output(z)
    assert dict(make_replayable(graph).counts) == {"resizes_erased": 2, "waits_added": 0}
    graph.lint()
    assert_expected_inline(render_calls(graph), """\
copy_(weight, value)
%0: f32[3, 3] = mm(x, weight)
%1: f32[3, 3] = mm(%0, earlier)
return (%1,)
""")
    assert dict(make_replayable(graph).counts) == {"resizes_erased": 0, "waits_added": 0}


def test_collective_in_flight_is_awaited(build: GraphBuilder) -> None:
    shard = build.input("shard", (4,))
    first, second = (build.call(c10d.all_gather_into_tensor.default, shard, 2, "0") for _ in range(2))
    awaited = build.call(c10d.wait_tensor.default, first)
    graph = build.output(awaited, second)
    assert dict(make_replayable(graph).counts) == {"resizes_erased": 0, "waits_added": 1}
    graph.lint()
    assert_expected_inline(render_calls(graph), """\
%0: f32[8] = all_gather_into_tensor(shard, 2, '0')
%1: f32[8] = all_gather_into_tensor(shard, 2, '0')
%2: f32[8] = wait_tensor(%0)
%3: f32[8] = wait_tensor(%1)
return (%2, %3)
""")
    assert dict(make_replayable(graph).counts) == {"resizes_erased": 0, "waits_added": 0}
