"""Both parts of a cut backward compute what the whole backward computes."""

from __future__ import annotations

import operator

import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from compile_fsdp.passes.partitioned.cut_backward import BackwardPart, cut_backward
from helpers.graphs.build import GraphBuilder, aten
from helpers.graphs.render import render


def _chain(ops: list[tuple[int, int, int, int]], gradients: list[int]) -> tuple[fx.Graph, list[fx.Node]]:
    """Build a graph of products, sums, views and tuples, each of earlier results, and return some of them."""
    build = GraphBuilder()
    nodes = [build.input(name, (4, 4)) for name in ("x", "y", "z")]
    count = len(nodes)
    for kind, left, right, dim in ops:
        a, b = nodes[left % len(nodes)], nodes[right % len(nodes)]
        if kind == 0:
            nodes.append(build.call(aten.mm.default, a, b))
        elif kind == 1:
            nodes.append(build.call(aten.add.Tensor, a, b))
        elif kind == 2:
            nodes.append(build.call(aten.permute.default, a, [1, 0]))
        else:
            pair = build.call(aten.max.dim, a, dim, True)
            wide = build.call(operator.getitem, pair, 0)
            nodes.append(build.call(aten.mul.Tensor, wide, b))
    results = list(dict.fromkeys(nodes[count + i % (len(nodes) - count)] for i in gradients))
    return build.output(*results), results


def _run(parts: list[BackwardPart], inputs: dict[fx.Node, torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    values = dict(inputs)
    for part in parts:
        found = fx.GraphModule({}, part.graph)(*(values[node] for node in part.inputs))
        values.update(zip(part.results, found, strict=True))
    return values


_OP = st.tuples(st.integers(0, 3), st.integers(0, 99), st.integers(0, 99), st.integers(0, 1))


@given(st.lists(_OP, min_size=1, max_size=16), st.lists(st.integers(0, 99), min_size=1, max_size=6), st.integers(0, 63))
@settings(max_examples=150, deadline=None)
def test_parts_compute_the_results_of_the_whole(
    ops: list[tuple[int, int, int, int]], places: list[int], chosen: int
) -> None:
    graph, results = _chain(ops, places)
    gradients = [node for i, node in enumerate(results) if chosen >> i & 1]
    parts = cut_backward(graph, results, gradients)
    inputs = {node: torch.randn(4, 4, dtype=torch.float64) for node in graph.find_nodes(op="placeholder")}
    expected = fx.GraphModule({}, graph)(*inputs.values())
    found = _run(parts, inputs)
    for node, value in zip(results, expected, strict=True):
        assert torch.equal(found[node], value)
    returned = [node for part in parts for node in part.results]
    assert len(set(returned)) == len(returned)
    if len(parts) == 2:  # each part makes gradients, and the first does not wait for the second
        first, second = (sum(node in gradients for node in part.results) for part in parts)
        assert first >= 3 * second


def test_second_part_takes_what_it_reads_and_repeats_views_and_sizes(build: GraphBuilder) -> None:
    size, rows = build.size("size"), build.size("rows")
    twice = build.call(operator.mul, rows, 2)
    names = ("grad_y", "x", "h", "w", "unread")
    grad_y, x, h, w, unread = (build.input(name, (4, 4)) for name in names)
    turned = build.call(aten.permute.default, h, [1, 0])
    g = build.call(aten.relu.default, grad_y)
    grad_v = build.call(aten.mm.default, turned, build.call(aten.cat.default, [g, g, g], 1))
    grad_w = build.call(aten.mm.default, build.call(aten.add.Tensor, build.call(aten.mul.Scalar, x, twice), turned), g)
    grad_x = build.call(aten.mm.default, g, w)
    results = [grad_x, grad_v, grad_w]
    first, second = cut_backward(build.output(*results), results, [grad_v, grad_w])
    assert unread not in (*first.inputs, *second.inputs)
    assert size in first.inputs
    assert_expected_inline(render(first.graph), """\
size: u0
rows: u1
grad_y: f32[4, 4]
h: f32[4, 4]
%0: 2*u1 = mul(rows, 2)
%1: f32[4, 4] = permute(h, [1, 0])
%2: f32[4, 4] = relu(grad_y)
%3: f32[4, 12] = cat([%2, %2, %2], 1)
%4: f32[4, 12] = mm(%1, %3)
return (%4, %2)
""")
    assert_expected_inline(render(second.graph), """\
size: u0
rows: u1
x: f32[4, 4]
h: f32[4, 4]
w: f32[4, 4]
relu_default: f32[4, 4]
%0: 2*u1 = mul(rows, 2)
%1: f32[4, 4] = permute(h, [1, 0])
%2: f32[4, 4] = mul(x, %0)
%3: f32[4, 4] = add(%2, %1)
%4: f32[4, 4] = mm(%3, relu_default)
%5: f32[4, 4] = mm(relu_default, w)
return (%5, %4)
""")


def test_backward_without_a_gradient_for_the_second_part_stays_whole(build: GraphBuilder) -> None:
    x, w = build.input("x", (4, 4)), build.input("w", (4, 4))
    gradient = build.call(aten.mm.default, x, w)
    results = [build.call(aten.relu.default, gradient), gradient]
    graph = build.output(*results)
    for gradients in ([gradient], []):
        (part,) = cut_backward(graph, results, gradients)
        assert render(part.graph) == render(graph)


def test_items_of_a_tuple_stay_with_their_op(build: GraphBuilder) -> None:
    x = build.input("x", (4, 16))
    pair = build.call(aten.split.Tensor, x, 4, 1)
    gradient = build.call(aten.relu.default, x)
    item = build.call(operator.getitem, pair, 1)
    last = build.call(aten.neg.default, item)
    first, second = cut_backward(build.output(gradient, last), [gradient, last], [gradient, last])
    assert item in first.results
    assert second.inputs == [item]
