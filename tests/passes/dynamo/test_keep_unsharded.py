"""Which groups stay unsharded from forward to backward, and what that does to the forward graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from compile_fsdp.ops import copy_, resize_storage_bytes_
from compile_fsdp.passes import Costs, keep_unsharded
from compile_fsdp.passes.dynamo.keep_unsharded import choose_kept
from helpers.graphs.build import GraphBuilder, aten
from helpers.graphs.render import render

COSTS = Costs(latency=1.0, comm_bandwidth=1.0, memory_bandwidth=1.0, flops=1.0)


@pytest.mark.parametrize(
    ("sizes", "budget", "kept"),
    [
        ([8, 8, 8, 8], 15, []),  # less than what passes anyway
        ([8, 8, 8, 8], 16, []),  # two that pass
        ([8, 8, 8, 8], 23, []),
        ([8, 8, 8, 8], 24, [3]),  # and two that pass
        ([8, 8, 8, 8], 32, [0, 1, 2, 3]),
        ([16, 2, 16, 16], 34, [1]),  # latency weighs more in small ones
        ([], 100, []),
    ],
)
def test_choice(sizes: list[int], budget: int, kept: list[int]) -> None:
    assert choose_kept(sizes, 2, budget, COSTS) == kept


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(0, 300))
def test_budget_is_kept_and_not_wasted(sizes: list[int], budget: int) -> None:
    kept = set(choose_kept(sizes, 2, budget, COSTS))
    passing = [size for i, size in enumerate(sizes) if i not in kept]
    held = sum(sizes[i] for i in kept)
    assert not kept or held + max((sum(passing[i : i + 2]) for i in range(len(passing))), default=0) <= budget
    if budget >= sum(sizes):
        assert kept == set(range(len(sizes)))


def test_chosen_group_is_not_freed() -> None:
    build = GraphBuilder(meta_key="example_value")
    x = build.input("x", (4, 4))
    weights = [build.input(f"w{i}", (4, 4)) for i in range(3)]
    value = build.input("value", (4, 4))
    for weight in weights:
        build.fill(weight, value)
        x = build.call(aten.mm.default, x, weight)
        build.free(weight)
    graph = build.output(x)
    groups = {weights[0]: "first", weights[1]: "second", weights[2]: "third"}
    assert keep_unsharded(graph, groups, ranks=2, budget=127, costs=COSTS) == []
    before = render(graph)
    assert before.count("resize_storage_bytes_") == 6
    assert keep_unsharded(graph, groups, ranks=2, budget=192, costs=COSTS) == ["first", "second", "third"]
    assert_expected_inline(render(graph), """\
x: f32[4, 4]
w0: f32[4, 4]
w1: f32[4, 4]
w2: f32[4, 4]
value: f32[4, 4]
resize_storage_bytes_(w0, 64)
copy_(w0, value)
%0: f32[4, 4] = mm(x, w0)
resize_storage_bytes_(w1, 64)
copy_(w1, value)
%1: f32[4, 4] = mm(%0, w1)
resize_storage_bytes_(w2, 64)
copy_(w2, value)
%2: f32[4, 4] = mm(%1, w2)
return (%2,)
""")


def test_group_that_is_filled_twice_is_left_alone() -> None:
    build = GraphBuilder(meta_key="example_value")
    weight, value = build.input("w", (4, 4)), build.input("value", (4, 4))
    for _ in range(2):
        build.fill(weight, value)
        result = build.call(aten.neg.default, weight)
        build.free(weight)
    graph = build.output(result)
    before = render(graph)
    assert keep_unsharded(graph, {weight: 0}, ranks=2, budget=10**6, costs=COSTS) == []
    assert render(graph) == before


def test_fills_and_frees_are_found_however_their_arguments_are_passed() -> None:
    build = GraphBuilder(meta_key="example_value")
    weight, value = build.input("w", (4, 4)), build.input("value", (4, 4))
    call = build.graph.call_function
    call(resize_storage_bytes_, (), {"variable": weight, "new_size": 64})
    call(copy_, (), {"tensor": weight, "data": value})
    free = call(resize_storage_bytes_, (), {"variable": weight, "new_size": 0})
    graph = build.output(value)
    assert keep_unsharded(graph, {weight: 0}, ranks=2, budget=64, costs=COSTS) == [0]
    assert free not in graph.nodes


@pytest.mark.parametrize(("latency", "kept"), [(1.0, 0), (0.0, 3)])
def test_given_costs_decide(latency: float, kept: int) -> None:
    build = GraphBuilder(meta_key="example_value")
    weights = [build.input(f"w{i}", (numel,)) for i, numel in enumerate((2, 4, 4, 4))]
    for weight in weights:
        build.fill(weight, weight)
        build.free(weight)
    groups = {weight: i for i, weight in enumerate(weights)}
    costs = replace(COSTS, latency=latency)
    assert keep_unsharded(build.output(), groups, ranks=2, budget=48, costs=costs) == [kept]


def test_what_is_no_parameter_of_a_group_is_left_alone() -> None:
    build = GraphBuilder(meta_key="example_value")
    weight, other, value = (build.input(name, (4, 4)) for name in ("w", "other", "value"))
    for each in (weight, other):
        build.fill(each, value)
        build.free(each)
    graph = build.output(value)
    assert keep_unsharded(graph, {weight: 0}, ranks=2, budget=10**6) == [0]
    assert len([node for node in graph.nodes if node.args and node.args[0] is weight]) == 2
    assert len([node for node in graph.nodes if node.args and node.args[0] is other]) == 3
    assert keep_unsharded(graph, {value: 0}, ranks=2, budget=10**6) == []
    assert keep_unsharded(graph, {}, ranks=2, budget=10**6) == []
