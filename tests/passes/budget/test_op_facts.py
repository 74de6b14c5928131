"""What is known of single ops of a Dynamo graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from compile_fsdp.passes.budget.op_facts import Kind, OpFacts, OpMeasure
from helpers.graphs.build import GraphBuilder

ROWS, DIM = 4, 8
SIZE = ROWS * DIM * 4


def _node(call: Callable[[GraphBuilder, fx.Node, fx.Node], fx.Node]) -> fx.Node:
    build = GraphBuilder(meta_key="example_value")
    with build.fake_mode:
        x = build.input_like("x", torch.empty(ROWS, DIM, requires_grad=True) * 1)
        weight = build.input_like("weight", torch.empty(DIM, DIM, requires_grad=True))
    return call(build, x, weight)


def _facts(call: Callable[[GraphBuilder, fx.Node, fx.Node], fx.Node], *, fuses: bool = True) -> OpFacts:
    return OpMeasure(fuses=fuses).facts(_node(call))


def test_a_product_is_a_kernel_that_saves_what_it_takes() -> None:
    facts = _facts(lambda build, x, weight: build.call(F.linear, x, weight))
    assert facts.kind is Kind.HEAVY
    assert facts.saved_inputs == {0, 1}
    assert not facts.saves_result
    assert facts.flops == 2 * ROWS * DIM * DIM
    assert facts.moved_bytes == 2 * SIZE + DIM * DIM * 4


@pytest.mark.parametrize(
    ("function", "saved_inputs", "saves_result"),
    [(F.silu, {0}, False), (torch.tanh, set(), True), (F.relu, set(), True), (torch.neg, set(), False)],
)
def test_what_pointwise_ops_save(function: Any, saved_inputs: set[int], saves_result: bool) -> None:
    facts = _facts(lambda build, x, _: build.call(function, x))
    assert facts.kind is Kind.FUSED
    assert facts.saved_inputs == saved_inputs
    assert facts.saves_result is saves_result
    assert facts.moved_bytes == 2 * SIZE
    assert facts.flops == 0
    assert facts.is_repeatable


def test_a_view_moves_nothing() -> None:
    facts = _facts(lambda build, x, _: build.call_method("view", x, -1))
    assert facts == OpFacts(Kind.VIEW, frozenset(), False, 0, 0, 0, is_repeatable=True)


def test_a_random_op_is_not_repeatable() -> None:
    facts = _facts(lambda build, x, _: build.call(F.dropout, x, 0.5))
    assert not facts.is_repeatable
    assert facts.internal_bytes == SIZE  # the mask


def test_a_norm_is_fused_by_inductor_alone() -> None:
    def norm(build: GraphBuilder, x: fx.Node, _: fx.Node) -> fx.Node:
        return build.call(F.layer_norm, x, (DIM,))

    assert _facts(norm).kind is Kind.FUSED
    assert _facts(norm, fuses=False).kind is Kind.HEAVY


def test_attention_is_a_kernel() -> None:
    facts = _facts(lambda build, x, _: build.call(F.scaled_dot_product_attention, *[_heads(build, x)] * 3))
    assert facts.kind is Kind.HEAVY
    assert facts.saves_result


def _heads(build: GraphBuilder, x: fx.Node) -> fx.Node:
    return build.call_method("view", x, 1, 2, ROWS, DIM // 2)


def _user_function(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("code of the user's runs once more")


def test_what_is_not_torchs_own_is_not_run() -> None:
    def call(build: GraphBuilder, x: fx.Node, _: fx.Node) -> fx.Node:
        return build.call_opaque(_user_function, x, value=build.value(x))

    facts = _facts(call)
    assert (facts.kind, facts.saved_inputs, facts.is_repeatable) == (Kind.HEAVY, {0}, False)


def test_ops_that_are_called_alike_are_run_once() -> None:
    build = GraphBuilder(meta_key="example_value")
    x, y = build.input("x", (2, 3)), build.input("y", (2, 3))
    measure = OpMeasure()
    first, second = (measure.facts(build.call(operator.add, *each)) for each in ((x, y), (y, x)))
    assert first is second
    assert measure.facts(build.call(operator.add, x, x)) is not first
