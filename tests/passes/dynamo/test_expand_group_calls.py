"""A call of a group is replaced by its ops, with their fake values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from expecttest import assert_expected_inline
from hypothesis import strategies as st
from torch import fx

from compile_fsdp.ops import copy_, resize_storage_bytes_
from compile_fsdp.passes.analysis.aliases import fake_value
from compile_fsdp.passes.dynamo.expand_group_calls import expand_group_calls
from compile_fsdp.torch_compat.dynamo import set_version_counter
from helpers.graphs.build import GraphBuilder
from helpers.graphs.execution import freed, run, storage_sizes
from helpers.graphs.fuzzing import MANY, fuzz
from helpers.graphs.render import render, render_calls


def halves(x: torch.Tensor, sizes: list[int], others: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    parts = (x + others[0]).split(sizes)
    return tuple([parts[i].relu() for i in range(len(sizes))])


def total(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.sum.default(x)


def clear(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        torch.ops.inductor.resize_storage_bytes_.default(tensor, 0)


def _graph() -> fx.Graph:
    build = GraphBuilder(meta_key="example_value")
    a, b = build.input("a", (6,)), build.input("b", (6,))
    parts = build.call(halves, a, [4, 2], [b])
    first, second = (build.call(operator.getitem, parts, i) for i in range(2))
    summed = build.call(total, first)
    build.call_opaque(clear, [a, b])
    return build.output(summed, second)


def test_calls_become_their_ops() -> None:
    graph = _graph()
    expand_group_calls(graph, {halves, total, clear})
    graph.lint()
    assert_expected_inline(render_calls(graph), """\
%0: f32[6] = add(a, b)
%1 = .split(%0, [4, 2])
%2: f32[4] = getitem(%1, 0)
%3: f32[4] = .relu(%2)
%4: f32[2] = getitem(%1, 1)
%5: f32[2] = .relu(%4)
%6: f32[] = sum(%3)
resize_storage_bytes_(a, 0)
resize_storage_bytes_(b, 0)
return (%6, %5)
""")


def test_other_calls_stay() -> None:
    graph = _graph()
    before = render(graph)
    expand_group_calls(graph, set())
    assert render(graph) == before


def test_expansion_does_not_write_the_fake_values_of_inputs() -> None:
    def refill(tensors: list[torch.Tensor], values: list[torch.Tensor], sizes: list[int]) -> None:
        for tensor, value, size in zip(tensors, values, sizes, strict=True):
            torch.ops.inductor.resize_storage_bytes_.default(tensor, size)
            torch.ops.fsdp.copy_.default(tensor, value)
            set_version_counter((tensor,), (7,))

    graph = _graph()
    a, b = graph.find_nodes(op="placeholder")
    with graph.inserting_before(graph.output_node()):
        graph.call_function(refill, ([a], [b], [64]))
    value = a.meta["example_value"]
    before = (value._version, value.untyped_storage().nbytes())
    expand_group_calls(graph, {refill})
    assert len([node for node in graph.nodes if node.target is set_version_counter]) == 1
    assert (value._version, value.untyped_storage().nbytes()) == before


# Steps of a group's call on (4, 4) tensors; it may also fill and free a parameter.
_STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "function": lambda x, y: torch.matmul(x, y),
    "method": lambda x, y: x.t(),
    "operator": lambda x, y: x + 2 * y,
    "several": lambda x, y: torch.cat(x.split([1, 3])[::-1]),
    "keyword": lambda x, y: torch.sum(x, 0, keepdim=True).expand(4, 4),
    "packet": lambda x, y: torch.ops.aten.maximum(x, y),
    "inplace": lambda x, y: (x - y).mul_(2),
}
_step = st.tuples(st.sampled_from([*_STEPS, "fill", "free"]), st.integers(0, 5), st.integers(0, 5))
_call_plans = st.tuples(st.lists(_step, max_size=6), st.sampled_from(["nothing", "one", "some"]), st.booleans())


def _function(steps: list[tuple[str, int, int]], returned: str) -> Callable[..., Any]:
    def call(tensors: list[torch.Tensor], parameters: tuple[torch.Tensor, ...], full: int) -> Any:
        values = list(tensors)
        for step, i, j in steps:
            left, right = values[i % len(values)], values[j % len(values)]
            if step == "fill":
                resize_storage_bytes_(parameters[i % 2], full)
                copy_(parameters[i % 2], right)
            elif step == "free":
                resize_storage_bytes_(parameters[i % 2], new_size=0)
            else:
                values.append(_STEPS[step](left, right))
        return {"nothing": None, "one": values[-1], "some": (values[-1], values[0])}[returned]

    return call


def check_calls(calls: list[tuple[list[tuple[str, int, int]], str, bool]]) -> None:
    build = GraphBuilder(meta_key="example_value")
    parameters = tuple(build.input(f"p{i}", (4, 4)) for i in range(2))
    values = [build.input("x", (4, 4))]
    functions = set()
    for steps, returned, is_expanded in calls:
        function = _function(steps, returned)
        node = build.call(function, values[-3:], parameters, full=64)
        if returned == "one":
            values.append(node)
        elif returned == "some":
            values += [build.call(operator.getitem, node, i) for i in range(2)]
        if is_expanded:
            functions.add(function)
    graph = build.output(*values)

    def outcome() -> tuple[list[torch.Tensor], dict[str, int]]:
        inputs = {"p0": freed(4, 4), "p1": freed(4, 4), "x": torch.arange(-8.0, 8.0).view(4, 4) % 5}
        results = run(graph, inputs)
        return results + [each for each in inputs.values() if each.untyped_storage().nbytes()], storage_sizes(inputs)

    expected, sizes = outcome()
    expand_group_calls(graph, functions)
    graph.lint()
    assert not functions.intersection(node.target for node in graph.nodes)
    for node in graph.nodes:
        assert (fake_value(node) is None) == (node.target in (copy_, resize_storage_bytes_))
    got, sizes_after = outcome()
    assert sizes_after == sizes
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@MANY
def test_expanded_ops_have_the_effects_of_their_call(examples: int) -> None:
    fuzz(check_calls, examples, st.lists(_call_plans, min_size=1, max_size=4))
