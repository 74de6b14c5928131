"""Gathers of the model that become the runtime's."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from torch import fx

from compile_fsdp.passes.post_grad.replace_unsafe_gathers import replace_unsafe_gathers
from helpers.graphs.build import GATHER, REDUCE, GraphBuilder, name_collectives
from helpers.graphs.render import render


def collectives(device: str) -> fx.Graph:
    build = GraphBuilder()
    x = build.input("x", (4,), device=device)
    return build.output(build.call(GATHER, x, 2, "tp"), build.call(REDUCE, x, "sum", 2, "tp"))


def test_gathers_on_the_cpu_are_replaced() -> None:
    graph = collectives("cpu")
    assert dict(replace_unsafe_gathers(graph).counts) == {"gathers_replaced": 1}
    graph.lint()
    assert all(node.args[-1] == "" for node in graph.nodes if "compile_fsdp" in str(node.target))
    assert_expected_inline(render(graph), """\
x: f32[4]
%0: f32[8] = all_gather_into_tensor(x, 2, 'tp', '')
%1: f32[2] = reduce_scatter_tensor(x, 'sum', 2, 'tp')
return (%0, %1)
""")
    assert dict(replace_unsafe_gathers(graph).counts) == {"gathers_replaced": 0}


@pytest.mark.parametrize("case", ["other device", "unknown device", "the runtime's"])
def test_gathers_of_the_runtime_and_off_the_cpu_stay(case: str) -> None:
    graph = collectives("meta" if case == "other device" else "cpu")
    if case == "the runtime's":
        name_collectives(graph)
    if case == "unknown device":
        for node in graph.find_nodes(op="call_function", target=GATHER):
            del node.meta["val"]
    before = render(graph)
    assert dict(replace_unsafe_gathers(graph).counts) == {"gathers_replaced": 0}
    assert render(graph) == before
