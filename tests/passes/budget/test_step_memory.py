"""Values that a step allocates, and values that the partitioner saves for the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from compile_fsdp.passes.budget.read_step import read_step
from compile_fsdp.passes.budget.step_memory import Group, Sharding, Step, Value
from compile_fsdp.torch_compat.dynamo import set_version_counter, tensor_version
from helpers.graphs.build import GraphBuilder

ROWS, DIM = 256, 16
SIZE = ROWS * DIM * 4
WEIGHT_BYTES = DIM * DIM * 4


class _Forward:
    """A graph under construction: an input with a gradient, an unsharded parameter, and the tensor that fills it."""

    def __init__(self) -> None:
        self.build = GraphBuilder(meta_key="example_value")
        with self.build.fake_mode:
            self.x = self.build.input_like("x", torch.empty(ROWS, DIM, requires_grad=True) * 1)
            self.weight = self.build.input_like("weight", torch.empty(DIM, DIM, requires_grad=True))
            self.gathered = self.build.input_like("gathered", torch.empty(DIM, DIM))

    def call(self, *args: Any, **kwargs: Any) -> fx.Node:
        return self.build.call(*args, **kwargs)

    def product(self) -> fx.Node:
        return self.call(F.linear, self.x, self.weight)

    def step(self, *outputs: fx.Node, fuses: bool = True) -> Step:
        sharding = Sharding(0, WEIGHT_BYTES // 2, WEIGHT_BYTES)
        return read_step(self.build.output(*outputs), {self.weight: sharding}, fuses=fuses)


@pytest.fixture
def forward() -> _Forward:
    return _Forward()


def _value(step: Step, node: fx.Node) -> Value:
    (value,) = step.made[step.ops.index(node)]
    return value


def _saved(step: Step) -> set[Any]:
    return {step.ops[value.made_at].target for value in step.values if value.is_saved}


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
    assert _saved(step) == {F.linear}
    assert sorted(_value(step, product).saved_by) == [1, 2, 3]


def _random_sum(forward: _Forward) -> fx.Node:
    return forward.call(torch.add, forward.x, forward.call(torch.rand_like, forward.x))


def _random_product(forward: _Forward) -> fx.Node:
    return forward.call(torch.mul, forward.x, forward.call(torch.rand_like, forward.x))


@pytest.mark.parametrize(
    ("read_by_cos", "saved"),
    [
        pytest.param(lambda forward: forward.call(torch.neg, forward.product()), torch.neg, id="unsaved source"),
        pytest.param(lambda forward: forward.call(F.dropout, forward.x, 0.5), F.dropout, id="random result"),
        pytest.param(_random_sum, torch.add, id="computed from an unsaved random result"),
        pytest.param(_random_product, torch.rand_like, id="computed from a saved random result"),
        pytest.param(
            lambda forward: forward.call(torch.neg, forward.call(torch.exp, forward.x)), None, id="computed from inputs"
        ),
    ],
)
def test_value_that_cannot_be_recomputed_cheaply_is_saved(
    forward: _Forward, read_by_cos: Callable[[_Forward], fx.Node], saved: Callable[..., torch.Tensor] | None
) -> None:
    step = forward.step(forward.call(torch.cos, read_by_cos(forward)))
    assert _saved(step) == {saved} - {None}


def test_cheap_result_is_saved_if_a_separate_kernel_reads_it_in_the_backward(forward: _Forward) -> None:
    hidden = forward.call(torch.sin, forward.x)
    assert _saved(forward.step(forward.call(F.linear, hidden, forward.weight))) == {torch.sin}


# Values that an op saves besides its inputs and results.


def test_statistics_of_a_norm_are_recomputed_if_the_norm_is_fused() -> None:
    for fuses, internal in ((True, 0), (False, 2 * ROWS * 4)):
        forward = _Forward()
        product = forward.product()
        step = forward.step(forward.call(F.layer_norm, product, (DIM,)), fuses=fuses)
        assert step.internal == [0, internal]
        assert _saved(step) == {F.linear}


def test_the_mask_of_a_random_op_is_saved(forward: _Forward) -> None:
    assert forward.step(forward.call(F.dropout, forward.x, 0.5)).internal == [SIZE]


def test_internal_values_of_a_fused_op_are_recomputed_if_its_inputs_are_no_larger() -> None:
    """A distance saves its differences only if the backward has neither of its inputs otherwise."""
    forward = _Forward()
    first = forward.product()
    one = forward.step(forward.call(F.pairwise_distance, first, forward.x))
    assert one.internal == [0, 0]
    assert _value(one, first).is_saved
    forward = _Forward()
    first = forward.product()
    second = forward.product()
    two = forward.step(forward.call(F.pairwise_distance, first, second))
    assert two.internal == [0, 0, SIZE]
    assert not _value(two, first).is_saved
    # An input that is saved anyway does not count.
    forward = _Forward()
    first = forward.product()
    forward.call(torch.cos, first)
    second = forward.product()
    saved = forward.step(forward.call(F.pairwise_distance, first, second))
    assert saved.internal == [0, 0, 0, 0]
    assert _value(saved, second).is_saved
