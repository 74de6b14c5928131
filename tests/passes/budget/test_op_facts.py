"""Facts about single ops of a Dynamo graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.testing._internal.two_tensor import TwoTensor

from compile_fsdp.passes.budget.op_facts import Kind, OpFacts, OpMeasure
from helpers.graphs.blocks import DIM, Forward
from helpers.graphs.build import GraphBuilder, aten, c10d

ROWS = 4
SIZE = ROWS * DIM * 4


def _facts(call: Callable[[GraphBuilder, fx.Node, fx.Node], fx.Node], *, fuses: bool = True) -> OpFacts:
    forward = Forward(ROWS, has_gradient=True)
    return OpMeasure(fuses=fuses).facts(call(forward.build, forward.x, forward.add_weight("weight", group=0)))


def test_product_is_a_kernel_that_saves_its_inputs() -> None:
    facts = _facts(lambda build, x, weight: build.call(F.linear, x, weight))
    flops, moved_bytes = 2 * ROWS * DIM * DIM, 2 * SIZE + DIM * DIM * 4
    assert facts == OpFacts(Kind.HEAVY, frozenset({0, 1}), False, 0, flops, moved_bytes, is_repeatable=True)


@pytest.mark.parametrize(
    ("function", "saved_inputs", "saves_result"),
    [
        *((F.silu, {0}, False), (torch.tanh, set(), True), (F.relu, set(), True), (torch.neg, set(), False)),
        (aten.neg.default, set(), False),
    ],
)
def test_saved_values_of_pointwise_ops(function: Any, saved_inputs: set[int], saves_result: bool) -> None:
    facts = _facts(lambda build, x, _: build.call(function, x))
    assert facts == OpFacts(Kind.FUSED, frozenset(saved_inputs), saves_result, 0, 0, 2 * SIZE, is_repeatable=True)


def test_weight_is_not_saved_if_the_input_needs_no_gradient() -> None:
    facts = _facts(lambda build, _, weight: build.call(F.linear, build.input("batch", (ROWS, DIM)), weight))
    assert facts.saved_inputs == {0}


def test_keyword_arguments_change_the_moved_bytes() -> None:
    build = GraphBuilder(meta_key="example_value")
    facts = OpMeasure().facts(build.call(torch.neg, build.input("x", (2, 3))))
    wider = OpMeasure().facts(build.call(torch.softmax, build.input("y", (2, 3)), -1, dtype=torch.float64))
    assert facts.moved_bytes == 2 * 24
    assert wider.moved_bytes == 24 + 48


def test_composite_op_that_runs_a_kernel_is_a_kernel() -> None:
    facts = _facts(lambda build, x, _: build.call(F.normalize, x), fuses=False)
    assert facts.kind is Kind.HEAVY


def test_a_view_moves_nothing() -> None:
    facts = _facts(lambda build, x, _: build.call_method("view", x, -1))
    assert facts == OpFacts(Kind.VIEW, frozenset(), False, 0, 0, 0, is_repeatable=True)


def test_a_random_op_is_not_repeatable() -> None:
    facts = _facts(lambda build, x, _: build.call(F.dropout, x, 0.5))
    assert not facts.is_repeatable
    assert facts.internal_bytes == SIZE  # the mask


def test_in_place_op_on_an_activation_is_run() -> None:
    facts = _facts(lambda build, x, _: build.call(F.relu, x, inplace=True))
    # The saved result is the memory of the input.
    assert facts == OpFacts(Kind.FUSED, frozenset({0}), False, 0, 0, 2 * SIZE, is_repeatable=False)


def test_in_place_op_saves_the_value_that_it_overwrites() -> None:
    facts = _facts(lambda build, x, _: build.call(F.silu, x, inplace=True))
    assert facts.saved_inputs == set()
    assert facts.internal_bytes == SIZE


def test_norm_is_fused_only_by_inductor() -> None:
    def norm(build: GraphBuilder, x: fx.Node, _: fx.Node) -> fx.Node:
        return build.call(F.layer_norm, x, (DIM,))

    assert _facts(norm).kind is Kind.FUSED
    assert _facts(norm, fuses=False).kind is Kind.HEAVY


def test_attention_is_a_kernel() -> None:
    def attention(build: GraphBuilder, x: fx.Node, _: fx.Node) -> fx.Node:
        return build.call(F.scaled_dot_product_attention, *[build.call_method("view", x, 1, 2, ROWS, DIM // 2)] * 3)

    facts = _facts(attention)
    assert (facts.kind, facts.saves_result) == (Kind.HEAVY, True)


def _is_unknown(facts: OpFacts) -> bool:
    return (facts.kind, facts.saved_inputs, facts.is_repeatable) == (Kind.HEAVY, {0}, False)


def test_user_function_is_not_run() -> None:
    calls = []

    def user_function(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return -x

    def call(build: GraphBuilder, x: fx.Node, _: fx.Node) -> fx.Node:
        return build.call_opaque(user_function, x, value=build.value(x))

    assert _is_unknown(_facts(call))
    assert not calls


def test_a_collective_is_not_run() -> None:
    assert _is_unknown(_facts(lambda build, x, _: build.call(c10d.all_reduce.default, x, "sum", "0")))


def test_op_on_a_tensor_subclass_is_not_run() -> None:
    def call(build: GraphBuilder, x: fx.Node, _: fx.Node) -> fx.Node:
        with build.fake_mode:
            pair = build.input_like("pair", TwoTensor(torch.empty(ROWS, DIM), torch.empty(ROWS, DIM)))
        return build.call_opaque(torch.neg, pair, value=build.value(x))

    assert _is_unknown(_facts(call))


def test_dynamic_sizes_count_with_their_hints() -> None:
    build = GraphBuilder(meta_key="example_value")
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    given = torch.empty(ROWS, DIM)
    x = build.input_like("x", build.fake_mode.from_tensor(given, symbolic_context=dynamic, source=ConstantSource("x")))
    rows = build.call(torch.ops.aten.sym_size.int, x, 0)
    facts = OpMeasure().facts(build.call(torch.narrow, x, 0, 0, rows))
    assert facts.kind is Kind.VIEW
    assert OpMeasure().facts(build.call(torch.neg, x)).moved_bytes == 2 * SIZE


def test_ops_with_like_arguments_are_run_once() -> None:
    build = GraphBuilder(meta_key="example_value")
    x, y = build.input("x", (2, 3)), build.input("y", (2, 3))
    measure = OpMeasure()
    first, second = (measure.facts(build.call(operator.add, *each)) for each in ((x, y), (y, x)))
    assert first is second
    assert measure.facts(build.call(operator.add, x, x)) is not first
