"""Random ops that a checkpoint runs again are called as graphs of their own."""

from __future__ import annotations

import operator

import torch
from expecttest import assert_expected_inline
from torch import fx

from compile_fsdp.passes.partitioned.call_random_ops import call_random_ops
from compile_fsdp.passes.partitioned.drop_random_states import drop_random_states
from helpers.graphs.build import GraphBuilder, aten
from helpers.graphs.halves import checkpoint_halves
from helpers.graphs.render import render, render_calls


def test_random_ops_are_called_by_name() -> None:
    forward, _ = checkpoint_halves(lambda x: torch.dropout(torch.dropout(x, 0.5, True).exp(), 0.25, True).sin())
    drop_random_states(forward)
    made = call_random_ops(forward, "block")
    assert list(made) == ["block draw 0", "block draw 1"]
    graphs = list(made.values())
    forward.lint()
    assert_expected_inline(render_calls(forward), """\
%0 = call_random_block([primals_1], [], 'block draw 0')
%1: u8[5056] = getitem(%0, 0)
%2: f32[1, 1, 2, 8] = getitem(%0, 1)
%3: f32[1, 1, 2, 8] = exp(%2)
%4 = call_random_block([%3], [], 'block draw 1')
%5: u8[5056] = getitem(%4, 0)
%6: f32[1, 1, 2, 8] = getitem(%4, 1)
%7: f32[1, 1, 2, 8] = sin(%6)
return (%7, primals_1, %1, %5)
""")
    assert_expected_inline(render(graphs[0]), """\
primals_1: f32[1, 1, 2, 8]
%0 = run_and_save_rng_state(native_dropout, primals_1, 0.5, True)
%1: u8[5056] = getitem(%0, 0)
%2 = getitem(%0, 1)
%3: f32[1, 1, 2, 8] = getitem(%2, 0)
return (%1, %3)
""")
    assert "run_and_save_rng_state(native_dropout, exp, 0.25, True)" in render(graphs[1])


def test_graph_of_a_random_op_returns_the_state_before_it() -> None:
    forward, _ = checkpoint_halves(lambda x: torch.dropout(x, 0.5, True).exp())
    drop_random_states(forward)
    (graph,) = call_random_ops(forward, "block").values()
    run, x = fx.GraphModule({}, graph), torch.ones(1, 1, 2, 8)
    before = torch.get_rng_state()
    state, drawn = run(x)
    assert torch.equal(state, before)
    assert not torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(state)
    assert torch.equal(drawn, torch.dropout(x, 0.5, True))


def test_sizes_are_passed_apart_from_tensors(build: GraphBuilder) -> None:
    given = build.size("given")
    both = build.call(torch.ops.higher_order.run_and_save_rng_state, aten.rand.default, [given, 4], device="cpu")
    state, drawn = (build.call(operator.getitem, both, i) for i in range(2))
    graph = build.output(state, drawn)
    (alone,) = call_random_ops(graph, "block").values()
    assert "call_random_block([], [given], 'block draw 0')" in render(graph)
    state, drawn = fx.GraphModule({}, alone)(3)
    assert drawn.shape == (3, 4)


def test_graph_without_random_ops_stays() -> None:
    forward, _ = checkpoint_halves(lambda x: x.exp().sin())
    before = render(forward)
    assert call_random_ops(forward, "block") == {}
    assert render(forward) == before
