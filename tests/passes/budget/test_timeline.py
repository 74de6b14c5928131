"""What a step holds at each of its places, in KiB: see [Note: A timeline of both halves]."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from compile_fsdp.passes import Costs
from compile_fsdp.passes.budget.step_memory import Sharding, Step
from compile_fsdp.passes.budget.timeline import Choices, Timeline
from helpers.graphs.build import GraphBuilder, checkpoint

RANKS, ROWS, DIM = 2, 256, 16  # an activation has 16 KiB, a matrix one
# A collective takes less than any op.
COSTS = Costs(latency=1e-6, comm_bandwidth=1e15, memory_bandwidth=1e10, flops=1e9, offload_bandwidth=1e30)
SLOW = replace(COSTS, latency=1.0)


class _Forward:
    """A graph under construction, with an input and matrices that are gathered."""

    def __init__(self, has_gradient: bool = True, costs: Costs = COSTS, fuses: bool = True) -> None:
        self.build = GraphBuilder(meta_key="example_value")
        with self.build.fake_mode:
            given = torch.empty(ROWS, DIM, requires_grad=True) * 1 if has_gradient else torch.empty(ROWS, DIM)
            self.x = self.build.input_like("x", given)
            self._frozen = self.build.input_like("frozen", torch.empty(DIM, DIM))
        self._costs, self._fuses = costs, fuses
        self._parameters: dict[fx.Node, Sharding] = {}

    def call(self, *args: Any) -> fx.Node:
        return self.build.call(*args)

    def product(self, x: fx.Node) -> fx.Node:
        """With a matrix that is not sharded and has no gradient: a kernel whose backward reads nothing."""
        return self.build.call(F.linear, x, self._frozen)

    def weights(self, group: int, count: int = 1, trains: bool = True, fills: bool = True) -> list[fx.Node]:
        """Matrices that are gathered together."""
        with self.build.fake_mode:
            made = [
                self.build.input_like(f"w{group}_{i}", torch.empty(DIM, DIM, requires_grad=trains))
                for i in range(count)
            ]
        for weight in made:
            self._parameters[weight] = Sharding(group, 512, 1024)
            if fills:
                self.build.fill(weight, self._frozen)
        return made

    def timeline(self, *outputs: fx.Node) -> Timeline:
        step = Step(self.build.output(*outputs), self._parameters, fuses=self._fuses)
        return Timeline(step, RANKS, self._costs)


def _held(timeline: Timeline, **choices: Any) -> list[int]:
    """In KiB, by place."""
    return [size // 1024 for size in timeline.held(Choices(**choices))]


def _chain(*functions: Callable[..., Any], **kwargs: Any) -> tuple[_Forward, list[fx.Node]]:
    """A forward of functions, each of the result of the one before; `F.linear` has a frozen matrix."""
    forward = _Forward(**kwargs)
    made = [forward.x]
    for function in functions:
        made.append(forward.product(made[-1]) if function is F.linear else forward.call(function, made[-1]))
    return forward, made[1:]


def _of_chain(*functions: Callable[..., Any], **kwargs: Any) -> Timeline:
    forward, made = _chain(*functions, **kwargs)
    return forward.timeline(made[-1])


# Values and their gradients.


def test_what_is_computed_with_its_reader_is_in_no_memory() -> None:
    chain = torch.sin, torch.cos, F.linear
    assert _held(_of_chain(*chain, has_gradient=False)) == [0, 16, 32, 0, 0, 0]
    assert _held(_of_chain(*chain, has_gradient=False, fuses=False)) == [16, 32, 32, 0, 0, 0]


def test_the_result_of_a_kernel_is_in_memory() -> None:
    assert _held(_of_chain(F.linear, torch.neg, has_gradient=False)) == [16, 32, 0, 0]


def test_what_two_ops_read_is_in_memory_until_both_have_run() -> None:
    forward, (first,) = _chain(torch.sin, has_gradient=False)
    both = forward.call(torch.add, forward.call(torch.cos, first), forward.call(torch.exp, first))
    assert _held(forward.timeline(both)) == [16, 16, 16, 32, 0, 0, 0, 0]


def test_a_view_is_no_reader() -> None:
    forward, (first,) = _chain(torch.sin, has_gradient=False)
    last = forward.call(torch.cos, forward.build.call_method("view", first, -1))
    assert _held(forward.timeline(last)) == [0, 0, 16, 0, 0, 0]


def test_what_is_read_by_what_is_in_no_memory_is_held_until_that_is_read() -> None:
    chain = F.linear, torch.neg, torch.exp, F.linear
    assert _held(_of_chain(*chain, has_gradient=False)) == [16, 16, 32, 32, 0, 0, 0, 0]


def test_what_is_written_in_place_is_held_until_then() -> None:
    forward, (first, last) = _chain(F.linear, F.linear, has_gradient=False)
    forward.build.call_method("add_", first, 1.0)
    assert _held(forward.timeline(last)) == [16, 32, 32, 0, 0, 0]


def test_results_are_held_until_the_forward_is_over() -> None:
    forward, made = _chain(F.linear, F.linear, F.linear, has_gradient=False)
    assert _held(forward.timeline(made[0], made[2])) == [16, 32, 48, 0, 0, 0]


def test_a_gradient_is_held_where_its_value_is() -> None:
    chain = torch.sin, torch.cos, F.linear
    assert _held(_of_chain(*chain)) == [0, 16, 32, 32, 16, 16]


def test_what_is_saved_is_held_until_its_backward() -> None:
    # Both the dropout's result and its mask; in the backward a gradient for each of the two ops.
    assert _held(_of_chain(F.dropout, torch.cos)) == [32, 48, 64, 32]


def test_what_is_computed_again_with_its_reader_is_held_for_that_alone() -> None:
    """Op by op, the backward of cos needs the result of sin once more."""
    assert _held(_of_chain(torch.sin, torch.cos, F.linear, fuses=False)) == [16, 32, 32, 32, 48, 16]


def test_op_by_op_what_is_computed_again_needs_all_that_it_is_computed_from() -> None:
    """The backward of the second sin needs the result of cos, and so that of the first sin."""
    chain = torch.sin, torch.cos, torch.sin, F.linear
    assert _held(_of_chain(*chain, fuses=False)) == [16, 32, 32, 32, 32, 64, 48, 16]


def test_op_by_op_what_is_saved_is_computed_from_nothing() -> None:
    assert _held(_of_chain(torch.sin, F.linear, torch.cos, fuses=False)) == [16, 32, 32, 48, 32, 16]


def test_what_a_kernel_makes_again_is_held_for_its_own_reader_alone() -> None:
    """The second sin's backward computes the result of cos from that of the first sin, within its own kernel."""
    forward, (_, sine) = _chain(F.linear, torch.sin)
    other = forward.call(torch.sin, forward.call(torch.cos, sine))
    step = forward.timeline(forward.call(torch.add, forward.product(other), forward.product(sine)))
    assert _held(step) == [16, 32, 32, 48, 64, 64, 64, 64, 64, 64, 48, 64, 48, 16]


# What the backward runs again.


def test_what_runs_again_runs_with_all_that_is_not_saved() -> None:
    step = _of_chain(F.linear, torch.exp, F.linear)
    assert _held(step) == [16, 32, 32, 48, 48, 16]
    assert _held(step, recomputed={1}) == [16, 32, 32, 32, 64, 16]


def test_what_runs_again_for_another_is_held_from_there_to_its_own_backward() -> None:
    step = _of_chain(F.linear, torch.exp, F.linear, torch.exp, F.linear)
    assert _held(step, recomputed={3}) == [16, 32, 32, 48, 48, 48, 80, 48, 48, 16]
    assert _held(step, recomputed={1, 3}) == [16, 32, 32, 32, 32, 32, 96, 48, 48, 16]


def test_what_two_that_run_again_need_is_computed_for_the_first_of_them() -> None:
    forward, (product, _, second) = _chain(F.linear, torch.exp, F.linear)
    step = forward.timeline(forward.call(torch.add, second, forward.call(torch.exp, product)))
    assert _held(step, recomputed={1, 3}) == [16, 32, 48, 48, 48, 48, 80, 48, 48, 16]


def test_what_is_cheap_is_held_from_the_first_time_that_it_is_computed_again() -> None:
    """The second product runs again with the result of sin, which the backward of cos reads later."""
    forward, (_, sine) = _chain(F.linear, torch.sin)
    cosine = forward.call(torch.cos, sine)
    again = forward.call(torch.exp, forward.product(sine))
    step = forward.timeline(forward.call(torch.add, cosine, again))
    more = [b - a for a, b in zip(_held(step), _held(step, recomputed={4}), strict=True)]
    # From where exp has run, it is not held; its backward at 7 needs it, and makes it of a product and a sine.
    assert more == [0, 0, 0, 0, 0, 0, -16, 32, 16, 0, 0, 0]


def test_statistics_of_what_runs_again_are_not_held() -> None:
    forward, (product,) = _chain(F.linear, fuses=False)
    step = forward.timeline(forward.product(forward.call(F.layer_norm, product, (DIM,))))
    kept, again = step.held(Choices()), step.held(Choices(recomputed={1}))
    statistics = 2 * ROWS * 4
    assert step.step.internal == [0, statistics, 0]
    assert [(a - b) % (16 * 1024) for a, b in zip(kept, again, strict=True)] == [0, 0, *[statistics] * 3, 0]


# Checkpoints of the user's: see [Note: Bodies of checkpoints].


def _exp_between(body: GraphBuilder, x: fx.Node, weight: fx.Node) -> fx.Node:
    """A product, exp and a product."""
    return body.call(F.linear, body.call(torch.exp, body.call(F.linear, x, weight)), weight)


def _gathered(body: GraphBuilder, x: fx.Node, weight: fx.Node) -> fx.Node:
    body.fill(weight, weight)
    last = _exp_between(body, x, weight)
    body.free(weight)
    return last


def _with_checkpoint(*bodies: Callable[..., fx.Node]) -> Timeline:
    """A product, checkpoints, and a product; the matrix of the middle is sharded."""
    forward, (x,) = _chain(F.linear)
    (weight,) = forward.weights(0, fills=_gathered not in bodies)
    for body in bodies:
        x = checkpoint(forward.build, x, weight, body)
    return forward.timeline(forward.product(x))


def test_a_checkpoint_holds_what_its_body_does_while_it_runs() -> None:
    step, several = _with_checkpoint(_exp_between), _with_checkpoint(_exp_between, _exp_between)
    # The body holds three at most: exp's result, its gradient, and that of the first product or the second.
    assert [size // 16 for size in _held(step)] == [1, 5, 3, 3, 6, 1]
    assert len(several.step.bodies) == 2


def test_a_parameter_that_a_checkpoint_gathers_is_held_inside() -> None:
    outside, inside = (_with_checkpoint(each) for each in (_exp_between, _gathered))
    assert _parameters(outside) != _parameters(inside)
    assert _parameters(inside)[0] == _parameters(inside)[2] == 0


def test_a_checkpoint_within_a_body_saves_nothing_while_that_runs() -> None:
    def nested(body: GraphBuilder, x: fx.Node, weight: fx.Node) -> fx.Node:
        return checkpoint(body, checkpoint(body, x, weight, _exp_between), weight, _exp_between)

    def followed(body: GraphBuilder, x: fx.Node, weight: fx.Node) -> fx.Node:
        return body.call(F.linear, checkpoint(body, x, weight, _exp_between), weight)

    one, two = (_held(_with_checkpoint(each))[4] // 16 for each in (_exp_between, nested))
    # While the second's backward runs: the first's result, the gradients of both, and what exp made in the first.
    assert two - one == 4
    # What a checkpoint returns is saved there.
    assert [size // 16 for size in _held(_with_checkpoint(followed))] == [1, 6, 3, 3, 7, 1]


def _read_behind_a_checkpoint(
    *readers: Callable[[_Forward, fx.Node, fx.Node], fx.Node], fuses: bool = True
) -> list[int]:
    """A checkpoint, what reads its result and a matrix one after the other, and a product."""
    forward = _Forward(fuses=fuses)
    (weight,) = forward.weights(0)
    result = checkpoint(forward.build, forward.x, weight, _exp_between)
    for reader in readers:
        result = reader(forward, result, weight)
    return [size // 16 for size in _held(forward.timeline(forward.product(result)))]


def _product(forward: _Forward, result: fx.Node, weight: fx.Node) -> fx.Node:
    return forward.call(F.linear, result, weight)


def _scale(forward: _Forward, result: fx.Node, weight: fx.Node) -> fx.Node:
    return forward.call(torch.mul, result, forward.build.call_method("select", weight, 0, 0))


def _sine(forward: _Forward, result: fx.Node, weight: fx.Node) -> fx.Node:
    return forward.call(torch.sin, result)


def _another(forward: _Forward, result: fx.Node, weight: fx.Node) -> fx.Node:
    return checkpoint(forward.build, result, weight, _exp_between)


def test_a_checkpoint_runs_again_where_its_result_is_needed() -> None:
    assert _read_behind_a_checkpoint(_sine) == [4, 2, 2, 2, 5, 4]
    # What the next checkpoint takes is saved.
    assert _read_behind_a_checkpoint(_another) == [4, 5, 3, 3, 6, 4]


def test_gradients_wait_where_a_parameters_gradient_needs_what_a_checkpoint_returns() -> None:
    # That of the product, until the checkpoint's own backward.
    assert _read_behind_a_checkpoint(_product) == [4, 2, 2, 2, 5, 5]
    assert _read_behind_a_checkpoint(_sine, _product) == [4, 2, 2, 3, 3, 3, 5, 4]
    assert _read_behind_a_checkpoint(_scale, _sine) == [4, 1, 1, 2, 2, 2, 5, 4, 2, 4]
    assert _read_behind_a_checkpoint(_scale, _scale, fuses=False) == [4, 1, 2, 1, 2, 2, 2, 6, 4, 5, 5, 7]
    assert _read_behind_a_checkpoint(_product, _sine, _product) == [4, 2, 2, 3, 4, 4, 4, 3, 5, 5]


# What leaves for the host's memory.


def test_of_an_op_with_two_results_the_one_that_is_saved_leaves_and_runs_again() -> None:
    forward = _Forward(has_gradient=False)
    both = forward.call(torch.sort, forward.x)
    values, indices = (forward.call(operator.getitem, both, i) for i in range(2))
    (weight,) = forward.weights(0)
    product = forward.call(F.linear, values, weight)
    step = forward.timeline(forward.call(torch.mul, product, forward.call(torch.sum, indices)))
    at = step.step.ops.index(both)
    assert [value.is_saved for value in step.step.made[at]] == [True, False]
    kept = _held(step)
    for choices in ({"offloaded": {at}}, {"recomputed": {at}}):
        fewer = [a - b for a, b in zip(kept, _held(step, **choices), strict=True)]
        assert set(fewer[:4]) == {0}
        assert max(fewer) == 16


def _sine_of_product(kept: bool = True, offloads: bool = True, **kwargs: Any) -> list[int]:
    """In activations. The backward of cos needs the result of sin, that of sin the product, which may leave."""
    forward = _Forward(**kwargs)
    (weight,) = forward.weights(0)
    sine = forward.call(torch.sin, forward.call(F.linear, forward.x, weight))
    last = forward.call(torch.add, forward.call(torch.cos, sine), sine)
    forward.build.free(weight)
    held = _held(forward.timeline(last), kept={0} if kept else set(), offloaded={0} if offloads else set())
    return [size // 16 for size in held]


def test_what_is_cheap_waits_for_its_own_backward_where_no_gather_stands_between() -> None:
    assert _sine_of_product() == [1, 2, 1, 2, 2, 4, 4, 1]
    assert _sine_of_product(kept=False) == [1, 2, 1, 2, 2, 4, 3, 1]
    assert _sine_of_product(offloads=False) == [1, 2, 2, 3, 3, 4, 3, 1]
    assert _sine_of_product(fuses=False) == [1, 2, 2, 3, 3, 4, 3, 1]


def test_a_kernel_that_runs_again_is_held_for_its_readers_alone() -> None:
    step = _of_chain(F.linear, torch.exp, F.linear, torch.sin)
    assert _held(step, offloaded={1}, recomputed={2}) == [16, 32, 32, 32, 64, 48, 48, 16]


# Parameters and their gradients: the rest of the bytes, in halves of a KiB.


def _parameters(timeline: Timeline, **choices: Any) -> list[int]:
    return [size // 512 % 32 for size in timeline.held(Choices(**choices))]


def _two_modules(costs: Costs = COSTS, frees_first: bool = True, trains: bool = True) -> Timeline:
    """Each with two products with one matrix."""
    forward = _Forward(costs=costs)
    x = forward.x
    for group in range(2):
        (weight,) = forward.weights(group, trains=trains)
        for _ in range(2):
            x = forward.call(F.linear, x, weight)
        if group or frees_first:
            forward.build.free(weight)
    return forward.timeline(x)


def test_a_parameter_is_gathered_just_before_it_is_used() -> None:
    # Gradients are whole for one or two places, on their way for another, and stay as shards.
    assert _parameters(_two_modules()) == [2, 4, 2, 2, 4, 7, 7, 6]


def test_a_slow_gather_is_launched_with_the_module_before() -> None:
    assert _parameters(_two_modules(SLOW)) == [4, 4, 2, 2, 6, 7, 7, 8]


def test_what_is_kept_is_held_from_its_gather_to_its_last_backward() -> None:
    expected = [2, 4, 4, 4, 6, 7, 7, 6]
    assert _parameters(_two_modules(), kept={0, 1}) == expected
    assert _parameters(_two_modules(frees_first=False), kept={1}) == expected


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    assert _parameters(_two_modules(trains=False)) == [2, 4, 2, 2, 2, 4, 2, 2]


def _one_module(count: int = 2, used: int = 2) -> Timeline:
    forward = _Forward()
    weights, x = forward.weights(0, count), forward.x
    for weight in weights[:used]:
        x = forward.call(F.linear, x, weight)
    for weight in weights:
        forward.build.free(weight)
    return forward.timeline(x)


def test_of_several_parameters_what_is_gathered_is_copied_out() -> None:
    step = _one_module()
    assert _parameters(step) == [8, 8, 10, 18]
    assert _parameters(step, kept={0}) == [8, 8, 6, 14]
    # Large packs are allowed for throughout, and then their copies are not counted again.
    assert _parameters(step, kept={0}, has_large_packs=True) == [8, 8, 10, 18]


def test_a_parameter_that_no_op_reads_is_not_gathered() -> None:
    assert _parameters(_one_module(count=2, used=1)) == _parameters(_one_module(count=1, used=1))


# Seconds.


def test_the_backward_of_a_product_takes_twice_as_long() -> None:
    step = _of_chain(F.linear, torch.sin)
    assert step.backward_seconds == [2 * step.seconds[0], step.seconds[1]]
