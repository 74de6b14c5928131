"""Saved results of marked ops are offloaded after their last use, and fetched before their first."""

from __future__ import annotations

import operator

import pytest
from expecttest import assert_expected_inline
from torch import fx

from compile_fsdp.passes.partitioned.offload_saved import offload_saved
from compile_fsdp.torch_compat.dynamo import request_offload
from helpers.graphs.build import GraphBuilder, aten
from helpers.graphs.render import render, render_calls

ROWS, DIM = 8, 4
BYTES = ROWS * DIM * 4


def halves(least: int = BYTES) -> tuple[fx.Graph, fx.Graph]:
    """Two products with saved results, and their backward; the products, a view and the result are marked."""
    build = GraphBuilder()
    x, w = build.input("x", (ROWS, DIM)), build.input("w", (DIM, DIM))
    first = build.call(aten.mm.default, x, w)
    view = build.call(aten.permute.default, first, [1, 0])
    second = build.call(aten.mm.default, build.call(aten.sin.default, first), w)
    result = build.call(aten.mm.default, view, build.call(aten.cos.default, second))
    for node in (first, view, second, result):
        request_offload(node, least)
    forward = build.output(result, first, second, view, result)
    build = GraphBuilder()
    saved = [build.input(node.name, tuple(node.meta["val"].shape)) for node in (first, second, view, result)]
    gradient = build.input("gradient", (ROWS, DIM))
    behind = build.call(aten.mul.Tensor, gradient, saved[1])
    before = build.call(aten.mul.Tensor, behind, saved[0])
    return forward, build.output(before, build.call(aten.neg.default, saved[0]))


def test_marked_results_are_offloaded_and_fetched() -> None:
    forward, backward = halves()
    assert offload_saved(forward, backward, results=1) == 2
    forward.lint()
    backward.lint()
    assert_expected_inline(render_calls(forward), """\
%0: f32[8, 4] = mm(x, w)
%1: f32[4, 8] = permute(%0, [1, 0])
%2: f32[8, 4] = sin(%0)
%3: f32[8, 4] = mm(%2, w)
%4: f32[8, 4] = cos(%3)
%5: f32[8, 4] = offload(%3, [], False)
%6: f32[4, 4] = mm(%1, %4)
%7: f32[8, 4] = offload(%0, [%3], True)
return (%6, %7, %5, %1, %6)
""")
    assert_expected_inline(render_calls(backward), """\
%0: f32[8, 4] = fetch(mm_default_1, device(type='cpu'))
%1: f32[8, 4] = wait_tensor(%0)
%2: f32[8, 4] = mul(gradient, %1)
%3: f32[8, 4] = fetch(mm_default, device(type='cpu'))
%4: f32[8, 4] = wait_tensor(%3)
%5: f32[8, 4] = mul(%2, %4)
%6: f32[8, 4] = neg(%4)
return (%5, %6)
""")


def test_small_results_are_not_offloaded() -> None:
    forward, backward = halves(least=BYTES + 1)
    before = render(forward), render(backward)
    assert offload_saved(forward, backward, results=1) == 0
    assert (render(forward), render(backward)) == before


def test_results_of_the_user_are_not_offloaded() -> None:
    forward, backward = halves()
    assert offload_saved(forward, backward, results=3) == 0


def test_other_saved_values_are_not_offloaded() -> None:
    """A result of the user, a size, an unmarked value, and a value that the backward does not take."""
    build = GraphBuilder()
    x = build.input("x", (ROWS, DIM))
    first, unmarked, untaken = (build.call(op, x) for op in (aten.sin.default, aten.cos.default, aten.neg.default))
    size = build.call(aten.sym_size.int, x, 0)
    for node in (first, size, untaken):
        request_offload(node, 1)
    forward = build.output(first, first, size, unmarked, untaken)
    output = forward.output_node()
    output.args = ((*output.args[0], 3),)
    build = GraphBuilder()
    saved = [build.input(node.name, (ROWS, DIM)) for node in (first, size, unmarked)]
    backward = build.output(build.call(aten.cat.default, saved))
    assert offload_saved(forward, backward, results=1) == 0


def test_items_of_a_split_are_offloaded_and_unread_items_are_not_fetched() -> None:
    build = GraphBuilder()
    halves = build.call(aten.split_with_sizes_copy.default, build.input("x", (ROWS, DIM)), [4, 4])
    read, unread = (build.call(operator.getitem, halves, i) for i in range(2))
    for node in (read, unread):
        request_offload(node, 1)
    forward = build.output(build.call(aten.add.Tensor, read, unread), read, unread)
    build = GraphBuilder()
    saved = [build.input(node.name, (4, DIM)) for node in (read, unread)]
    backward = build.output(build.call(aten.neg.default, saved[0]))
    assert offload_saved(forward, backward, results=1) == 2
    fetched = [node.args[0] for node in backward.nodes if "fetch" in str(node.target)]
    assert fetched == saved[:1]


@pytest.mark.parametrize("is_shared", [True, False])
def test_each_tensor_is_kept_until_the_next_offload(is_shared: bool) -> None:
    """Also if one op is the last use of both tensors."""
    build = GraphBuilder()
    x = build.input("x", (ROWS, DIM))
    one, two = build.call(aten.sin.default, x), build.call(aten.cos.default, x)
    if not is_shared:
        build.call(aten.neg.default, one)
    both = build.call(aten.add.Tensor, one, two)
    for node in (one, two):
        request_offload(node, BYTES)
    forward = build.output(both, one, two)
    build = GraphBuilder()
    saved = [build.input(node.name, (ROWS, DIM)) for node in (one, two)]
    backward = build.output(build.call(aten.add.Tensor, *saved))
    assert offload_saved(forward, backward, results=1) == 2
    sent = [node.args[:2] for node in forward.nodes if "offload" in str(node.target)]
    assert sent == [(one, []), (two, [one])]
