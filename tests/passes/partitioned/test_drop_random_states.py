"""Attention without dropout runs again without a saved state; random ops keep theirs."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention

from compile_fsdp.passes.analysis.aliases import get_fake_tensor
from compile_fsdp.passes.partitioned.drop_random_states import drop_random_states, is_random, is_state
from helpers.graphs.build import GraphBuilder, aten
from helpers.graphs.build import checkpoint as checkpoint_node
from helpers.graphs.halves import checkpoint_halves
from helpers.graphs.render import render

_attention = aten._scaled_dot_product_flash_attention_for_cpu.default


def _render(graph: fx.Graph) -> str:
    return render(graph).replace("_scaled_dot_product_flash_attention_for_cpu", "attention")


def _attend(x: Tensor) -> Tensor:
    return scaled_dot_product_attention(x, x, x)


def test_attention_without_dropout_is_called_directly() -> None:
    graphs = checkpoint_halves(_attend)
    for graph in graphs:
        drop_random_states(graph)
        graph.lint()
        drop_random_states(graph)  # a second run finds nothing to change
    assert_expected_inline("\n".join(map(_render, graphs)), """\
primals_1: f32[1, 1, 2, 8]
%0 = attention(primals_1, primals_1, primals_1)
%1: f32[1, 1, 2, 8] = getitem(%0, 0)
return (%1, primals_1)

primals_1: f32[1, 1, 2, 8]
tangents_1: f32[1, 1, 2, 8]
%0 = attention(primals_1, primals_1, primals_1)
%1: f32[1, 1, 2, 8] = getitem(%0, 0)
%2: f32[1, 1, 2] = getitem(%0, 1)
%3: f32[1, 1, 2, 8] = detach(%1)
%4: f32[1, 1, 2, 8] = detach(%3)
%5 = attention_backward(tangents_1, primals_1, primals_1, primals_1, %4, %2, 0.0, False)
%6: f32[1, 1, 2, 8] = getitem(%5, 0)
%7: f32[1, 1, 2, 8] = getitem(%5, 1)
%8: f32[1, 1, 2, 8] = getitem(%5, 2)
%9: f32[1, 1, 2, 8] = add(%6, %7)
%10: f32[1, 1, 2, 8] = add(%9, %8)
return (%10,)
""")


def test_random_op_keeps_its_state() -> None:
    forward, backward = checkpoint_halves(lambda x: _attend(torch.dropout(x, 0.5, True)))
    drop_random_states(forward)
    drop_random_states(backward)
    for graph, name in ((forward, "run_and_save_rng_state"), (backward, "run_with_rng_state")):
        wrapped = [node for node in graph.nodes if str(node.target) == name]
        assert [node.args[-4] for node in wrapped] == [torch.ops.aten.native_dropout.default]
        assert list(map(is_random, wrapped)) == [name == "run_and_save_rng_state"]
        graph.lint()


def test_state_that_stays_has_a_constant_size() -> None:
    size = torch.get_rng_state().numel()
    forward, backward = checkpoint_halves(lambda x: torch.dropout(x, 0.5, True).exp())
    drop_random_states(forward)
    drop_random_states(backward)
    states = [*filter(is_state, forward.nodes), *backward.find_nodes(op="placeholder", sort=True)]
    shapes = [get_fake_tensor(node).shape for node in states if "rng_state" in node.name or is_state(node)]
    assert len(shapes) == 2
    assert all(type(each) is int and each == size for shape in shapes for each in shape)


def test_other_ops_that_run_a_graph_stay(build: GraphBuilder) -> None:
    x, weight = build.input("x", (4, 4)), build.input("weight", (4, 4))
    run = checkpoint_node(build, x, weight, lambda body, *inputs: body.call(aten.mm.default, *inputs))
    graph = build.output(run)
    before = render(graph)
    drop_random_states(graph)
    assert render(graph) == before


@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
def test_gradient_of_attention_draws_no_numbers(kernel: str) -> None:
    op = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    assert torch.Tag.nondeterministic_seeded in op.tags
    assert not is_random(fx.Graph().call_function(op))


def test_only_ops_that_draw_numbers_are_random() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    random = [
        graph.call_function(aten.native_dropout.default, (x, 0.5, True)),
        graph.call_function(_attention, (x, x, x, 0.5)),
    ]
    plain = [
        x,
        graph.call_function(aten.sin.default, (x,)),
        graph.call_function(_attention, (x, x, x)),
        graph.call_function(torch.dropout, (x, 0.5, True)),  # no op of ATen
    ]
    assert list(map(is_random, [*random, *plain])) == [True] * len(random) + [False] * len(plain)
