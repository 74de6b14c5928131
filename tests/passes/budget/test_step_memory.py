"""Values that a step allocates, and values that the partitioner saves for the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from compile_fsdp.passes.budget.step_memory import Group, Step, Value
from compile_fsdp.torch_compat.dynamo import set_version_counter, tensor_version
from helpers.graphs.blocks import DIM, ROWS, Forward, saved_ops

SIZE = ROWS * DIM * 4
WEIGHT_BYTES = DIM * DIM * 4


class _Forward(Forward):
    """A forward with an unsharded parameter, and the tensor that fills it."""

    def __init__(self) -> None:
        super().__init__(has_gradient=True)
        self.weight, self.gathered = self.add_weight("weight", group=0), self.build.input("gathered", (DIM, DIM))

    def product(self) -> fx.Node:
        return self.call(F.linear, self.x, self.weight)


@pytest.fixture
def forward() -> _Forward:
    return _Forward()


def _value(step: Step, node: fx.Node) -> Value:
    (value,) = step.made[step.ops.index(node)]
    return value


# Ops and their allocations.


def test_views_allocate_nothing_and_their_readers_use_the_base(forward: _Forward) -> None:
    first = forward.call(torch.sin, forward.x)
    view = forward.build.call_method("view", first, -1)
    last = forward.call(torch.cos, view)
    step = forward.step(last)
    assert [[value.size for value in made] for made in step.made] == [[SIZE], [], [SIZE]]
    assert _value(step, first).uses == [1, 2]
    assert step.made[2][0].sources == [_value(step, first)]


def test_views_of_inputs_and_of_parameters_allocate_nothing(forward: _Forward) -> None:
    forward.build.fill(forward.weight, forward.gathered)
    flat = forward.build.call_method("view", forward.x, DIM, ROWS)
    transposed = forward.build.call_method("t", forward.weight)
    product = forward.call(torch.matmul, transposed, flat)
    step = forward.step(product)
    assert [len(made) for made in step.made] == [0, 0, 1]
    assert [len(read) for read in step.read] == [0, 1, 1]


def test_only_allocated_values_that_the_graph_returns_are_results(forward: _Forward) -> None:
    inner = forward.call(torch.sin, forward.x)
    outer = forward.call(torch.cos, inner)
    step = forward.step(forward.x, outer)
    assert [value.is_result for value in step.values] == [False, True]


def test_op_that_takes_a_list_allocates_its_result(forward: _Forward) -> None:
    both = forward.call(torch.cat, [forward.x, forward.x])
    assert _value(forward.step(both), both).size == 2 * SIZE


def test_op_that_returns_a_number_does_not_count(forward: _Forward) -> None:
    forward.call(torch.ops.aten.sym_size.int, forward.x, 0)
    last = forward.call(torch.cos, forward.x)
    assert forward.step(last).ops == [last]


# Parameters and their upkeep.


def _group(step: Step) -> Group:
    (group,) = step.groups
    return group


def test_a_parameter_is_filled_and_freed_around_its_uses(forward: _Forward) -> None:
    before = forward.call(torch.sin, forward.x)
    prepared = forward.call(torch.neg, forward.gathered)  # only the fill of the parameter reads it
    forward.build.fill(forward.weight, prepared)
    product = forward.call(F.linear, before, forward.weight)
    free = forward.build.free(forward.weight)
    after = forward.call(torch.cos, product)
    step = forward.step(after)
    assert step.ops == [before, product, after]
    group = _group(step)
    assert (group.size, group.uses, group.frees) == (WEIGHT_BYTES, [1], [free])
    assert (group.filled_at, group.freed_at, group.parameters[0].fills) == (1, 2, 1)
    assert step.windows == [None, group, None]


def test_source_of_a_fill_counts_as_an_op_if_another_op_reads_it(forward: _Forward) -> None:
    prepared = forward.call(torch.neg, forward.gathered)
    forward.build.fill(forward.weight, prepared)
    other = forward.call(torch.add, prepared, forward.call(F.linear, forward.gathered, forward.weight))
    assert forward.step(other).ops[0] is prepared


def test_op_without_readers_counts(forward: _Forward) -> None:
    unread = forward.call(torch.neg, forward.x)
    assert forward.step(forward.call(torch.cos, forward.x)).ops[0] is unread


def test_fills_and_frees_of_other_tensors_do_not_count(forward: _Forward) -> None:
    own = forward.build.input("own", (DIM, DIM))
    forward.build.fill(own, forward.gathered)
    forward.build.free(own)
    unknown = forward.build.graph.placeholder("unknown")  # without a fake tensor
    forward.build.graph.call_function(torch.ops.fsdp.copy_.default, (unknown, forward.gathered))
    forward.build.fill(forward.weight, forward.gathered)
    group = _group(forward.step(forward.product()))
    assert (group.parameters[0].fills, group.frees, group.size) == (1, [], WEIGHT_BYTES)


def test_fills_and_frees_with_keyword_arguments_count(forward: _Forward) -> None:
    resize, copy = torch.ops.inductor.resize_storage_bytes_.default, torch.ops.fsdp.copy_.default
    forward.build.call(resize, variable=forward.weight, new_size=WEIGHT_BYTES)
    forward.build.call(copy, tensor=forward.weight, data=forward.gathered)
    product = forward.product()
    free = forward.build.call(resize, variable=forward.weight, new_size=0)
    group = _group(forward.step(product))
    assert (group.parameters[0].fills, group.frees, group.size) == (1, [free], WEIGHT_BYTES)


def test_version_counter_calls_are_no_fills_and_no_frees(forward: _Forward) -> None:
    forward.build.fill(forward.weight, forward.gathered)
    version = forward.build.call_opaque(tensor_version, forward.weight)
    forward.build.call_opaque(set_version_counter, (forward.weight,), (version,))
    group = _group(forward.step(forward.product()))
    assert (group.parameters[0].fills, group.frees, group.size) == (1, [], WEIGHT_BYTES)


# Saved values.


def test_cheap_results_are_recomputed_from_a_saved_source(forward: _Forward) -> None:
    product = forward.product()
    step = forward.step(forward.call(torch.cos, forward.call(torch.exp, forward.call(torch.sin, product))))
    # sin's backward needs the product. exp's and cos's need exp's result, which is computed from the product.
    assert saved_ops(step) == {F.linear}
    assert sorted(_value(step, product).saved_by) == [1, 2, 3]


def _with_random(op: Callable[..., Any]) -> Callable[[_Forward], fx.Node]:
    return lambda forward: forward.call(op, forward.x, forward.call(torch.rand_like, forward.x))


@pytest.mark.parametrize(
    ("read_by_cos", "saved"),
    [
        pytest.param(lambda forward: forward.call(torch.neg, forward.product()), torch.neg, id="unsaved source"),
        pytest.param(lambda forward: forward.call(F.dropout, forward.x, 0.5), F.dropout, id="random result"),
        pytest.param(_with_random(torch.add), torch.add, id="computed from an unsaved random result"),
        pytest.param(_with_random(torch.mul), torch.rand_like, id="computed from a saved random result"),
        pytest.param(lambda forward: forward.build.chain(forward.x, torch.exp, torch.neg), None, id="from inputs"),
    ],
)
def test_value_that_cannot_be_recomputed_cheaply_is_saved(
    forward: _Forward, read_by_cos: Callable[[_Forward], fx.Node], saved: Callable[..., torch.Tensor] | None
) -> None:
    step = forward.step(forward.call(torch.cos, read_by_cos(forward)))
    assert saved_ops(step) == {saved} - {None}


def test_cheap_result_is_saved_if_a_separate_kernel_reads_it_in_the_backward(forward: _Forward) -> None:
    hidden = forward.call(torch.sin, forward.x)
    assert saved_ops(forward.step(forward.call(F.linear, hidden, forward.weight))) == {torch.sin}


# Values that an op saves besides its inputs and results.


def test_statistics_of_a_norm_are_recomputed_if_the_norm_is_fused() -> None:
    for fuses, internal in ((True, 0), (False, 2 * ROWS * 4)):
        forward = _Forward()
        product = forward.product()
        step = forward.step(forward.call(F.layer_norm, product, (DIM,)), fuses=fuses)
        assert step.internal == [0, internal]
        assert saved_ops(step) == {F.linear}


def test_the_mask_of_a_random_op_is_saved(forward: _Forward) -> None:
    assert forward.step(forward.call(F.dropout, forward.x, 0.5)).internal == [SIZE]


def test_internal_values_of_a_fused_op_are_recomputed_if_its_inputs_are_no_larger() -> None:
    """A distance saves its differences only if the backward has neither of its inputs otherwise."""
    forward = _Forward()
    first = forward.product()
    one = forward.step(forward.call(F.pairwise_distance, first, forward.x))
    assert one.internal == [0, 0]
    assert _value(one, first).is_saved
    for is_saved_anyway in (False, True):
        forward = _Forward()
        first = forward.product()
        if is_saved_anyway:
            forward.call(torch.cos, first)
        second = forward.product()
        two = forward.step(forward.call(F.pairwise_distance, first, second))
        assert two.internal == ([0, 0, 0, 0] if is_saved_anyway else [0, 0, SIZE])
        assert [_value(two, each).is_saved for each in (first, second)] == [is_saved_anyway] * 2
