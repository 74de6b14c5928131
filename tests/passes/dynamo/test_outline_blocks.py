"""Equal blocks become calls of one name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from expecttest import assert_expected_inline
from torch import fx

from compile_fsdp.ops import run_block
from compile_fsdp.passes.analysis.equal_blocks import BlockCall
from compile_fsdp.passes.dynamo.outline_blocks import outline_blocks
from helpers.graphs.build import GraphBuilder
from helpers.graphs.render import render, render_calls

_CHAIN = (torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.sin, torch.relu)


def _graph(first_scale: float = 1.0) -> fx.Graph:
    """Build two blocks of eight ops, each with its weight, and a sum."""
    build = GraphBuilder(meta_key="example_value")
    x = hidden = build.input("x", (4, 4))
    for i, scale in enumerate((first_scale, 1.0)):
        weight, value = build.input(f"weight_{i}", (4, 4)), build.input(f"value_{i}", (4, 4))
        build.fill(weight, value)
        hidden = build.chain(build.call(torch.mul, build.call(torch.matmul, hidden, weight), scale), *_CHAIN)
        build.free(weight)
    return build.output(build.call(torch.add, hidden, x))


def _name(found: list[tuple[list[str], int]]) -> Callable[[BlockCall, int], str | None]:
    def compile_block(call: BlockCall, count: int) -> str:
        found.append(([node.name for node in call.tensors], count))
        return "block"

    return compile_block


def test_equal_blocks_are_compiled_once_and_called() -> None:
    graph, found = _graph(), list[tuple[list[str], int]]()
    outline_blocks(graph, _name(found))
    graph.lint()
    assert found == [(["x", "weight_0"], 2)]
    assert_expected_inline(render_calls(graph), """\
resize_storage_bytes_(weight_0, 64)
copy_(weight_0, value_0)
%0 = run_block('block', 0, x, weight_0)
%1: f32[4, 4] = getitem(%0, 0)
resize_storage_bytes_(weight_0, 0)
resize_storage_bytes_(weight_1, 64)
copy_(weight_1, value_1)
%2 = run_block('block', 0, %1, weight_1)
%3: f32[4, 4] = getitem(%2, 0)
resize_storage_bytes_(weight_1, 0)
%4: f32[4, 4] = add(%3, x)
return (%4,)
""")


def test_results_of_calls_keep_their_fake_values() -> None:
    graph = _graph()
    expected = {node.meta["example_value"].shape for node in graph.find_nodes(op="call_function", target=torch.relu)}
    outline_blocks(graph, _name([]))
    items = [node.meta["example_value"] for node in graph.nodes if node.name.startswith("getitem")]
    assert len(items) == 2
    assert {item.shape for item in items} == expected


def test_second_call_on_the_same_inputs_stays() -> None:
    build, outputs = GraphBuilder(meta_key="example_value"), []
    x, weight = build.input("x", (4, 4)), build.input("weight", (4, 4))
    for _ in range(2):
        outputs.append(build.chain(x, *_CHAIN))
        build.free(weight)
    graph = build.output(*outputs)
    outline_blocks(graph, _name([]))
    assert len(graph.find_nodes(op="call_function", target=run_block)) == 1


def test_different_blocks_and_refused_blocks_stay() -> None:
    graph = _graph(first_scale=2.0)
    before = render(graph)
    outline_blocks(graph, _name([]))
    assert render(graph) == before
    graph = _graph()
    before = render(graph)
    outline_blocks(graph, lambda call, count: None)
    assert render(graph) == before
