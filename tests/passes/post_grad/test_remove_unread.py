"""Unread values are not gathered; a value read twice is gathered once while it is alive."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from torch import fx

from compile_fsdp.passes.post_grad.remove_unread import remove_unread
from helpers.graphs.build import GATHER, GraphBuilder, aten, c10d, gather
from helpers.graphs.lockstep import same_results
from helpers.graphs.render import render, render_calls


def gathers(graph: fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=GATHER))


def assert_stays(graph: fx.Graph) -> None:
    before = render(graph)
    remove_unread(graph)
    assert render(graph) == before


def reading_twice(still_alive: bool, write: bool = False) -> fx.Graph:
    build = GraphBuilder()
    shards = [build.input("a", (2,)), build.input("b", (3,))]
    first = gather(build, shards, 2)
    read = build.call(aten.neg.default, first[0])
    if write:
        build.graph.call_function(aten.zero_.default, (shards[0],))
    second = gather(build, shards, 2)
    results = [read, build.call(aten.sin.default, second[0]), build.call(aten.cos.default, second[1])]
    return build.output(*results, build.call(aten.exp.default, first[1] if still_alive else second[1]))


def test_unread_gather_is_removed_with_the_ops_on_its_value(build: GraphBuilder) -> None:
    shards = [build.input(name, (numel,)) for name, numel in (("a", 2), ("b", 3))]
    gather(build, shards, 2)
    (rows,) = gather(build, shards[1:], 2)
    build.call(aten.new_empty_strided.default, rows, [2, 3], [3, 1])
    graph = build.output(build.call(aten.neg.default, rows))
    report = remove_unread(graph)
    assert dict(report.counts) == {"gathers_unread": 1, "gathers_repeated": 0, "other_nodes": 7}
    assert_expected_inline(render_calls(graph), """\
%0: f32[6] = all_gather_into_tensor(b, 2, 'dp')
%1: f32[6] = wait_tensor(%0)
%2: f32[2, 3] = reshape(%1, [2, 3])
%3: f32[2, 3] = neg(%2)
return (%3,)
""")


def test_unread_parameter_of_a_pack_is_still_gathered(build: GraphBuilder) -> None:
    items = gather(build, [build.input("a", (2,)), build.input("b", (3,))], 2)
    graph = build.output(build.call(aten.neg.default, items[1]))
    remove_unread(graph)
    assert gathers(graph) == 1


@pytest.mark.parametrize(("still_alive", "write", "left"), [(True, False, 1), (False, False, 2), (True, True, 2)])
def test_value_is_gathered_again_only_if_it_is_dead_or_out_of_date(still_alive: bool, write: bool, left: int) -> None:
    graph = reading_twice(still_alive, write)
    with same_results(graph):
        assert dict(remove_unread(graph).counts)["gathers_repeated"] == 2 - left
    assert gathers(graph) == left


def test_unread_collective_of_the_user_stays(build: GraphBuilder) -> None:
    launched = build.call(c10d.all_reduce.default, build.input("x", (2,)), "sum", "dp")
    build.call(c10d.wait_tensor.default, launched)
    assert_stays(build.output())


@pytest.mark.parametrize("sent", ["computed values", "different shards"])
def test_gathers_of_computed_values_or_of_different_shards_are_not_joined(build: GraphBuilder, sent: str) -> None:
    """The first gather's value is read after the second gather."""
    first = second = build.call(aten.neg.default, build.input("a", (2,)))
    if sent == "different shards":
        first, second = build.input("b", (2,)), build.input("c", (2,))
    (old,), (new,) = gather(build, [first], 2), gather(build, [second], 2)
    graph = build.output(build.call(aten.sin.default, new), build.call(aten.cos.default, old))
    assert dict(remove_unread(graph).counts)["gathers_repeated"] == 0


def test_gathers_of_shards_joined_along_different_dims_are_not_joined(build: GraphBuilder) -> None:
    shards, values = [build.input(name, (2, 2)) for name in "ab"], []
    for dim in (0, 1):
        launched = build.call(GATHER, build.call(aten.cat.default, shards, dim), 2, "dp")
        values.append(build.call(c10d.wait_tensor.default, launched))
    graph = build.output(*(build.call(aten.neg.default, value) for value in reversed(values)))
    assert dict(remove_unread(graph).counts)["gathers_repeated"] == 0


def test_gathers_with_two_waits_are_not_joined(build: GraphBuilder) -> None:
    shard = build.input("a", (2,))
    results = []
    for _ in range(2):
        launched = build.call(GATHER, shard, 2, "dp")
        results += [build.call(c10d.wait_tensor.default, launched) for _ in range(2)]
    graph = build.output(*(build.call(aten.neg.default, each) for each in (*results, results[0])))
    assert dict(remove_unread(graph).counts)["gathers_repeated"] == 0


def test_gather_with_a_second_unread_wait_stays(build: GraphBuilder) -> None:
    launched = build.call(GATHER, build.input("a", (2,)), 2, "dp")
    read = build.call(c10d.wait_tensor.default, launched)
    build.call(c10d.wait_tensor.default, launched)
    assert_stays(build.output(build.call(aten.neg.default, read)))
