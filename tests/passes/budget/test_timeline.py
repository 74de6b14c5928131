"""Memory that a step holds at each place, in KiB: see [Note: A timeline of both halves]."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from compile_fsdp.passes import Costs
from compile_fsdp.passes.budget.step_memory import Choices
from compile_fsdp.passes.budget.timeline import Timeline
from helpers.graphs.blocks import DIM, RANKS, ROWS, Forward
from helpers.graphs.build import GraphBuilder, checkpoint

# An activation has 16 KiB, a matrix 1 KiB. A collective takes less time than any op.
COSTS = Costs(latency=1e-6, comm_bandwidth=1e15, memory_bandwidth=1e10, flops=1e9, offload_bandwidth=1e30)
SLOW = replace(COSTS, latency=1.0)


class _Forward(Forward):
    """A forward with matrices that are gathered, and an unsharded, frozen matrix."""

    def __init__(self, has_gradient: bool = True, costs: Costs = COSTS, fuses: bool = True) -> None:
        super().__init__(has_gradient=has_gradient)
        self._frozen = self.build.input("frozen", (DIM, DIM))
        self._costs, self._fuses = costs, fuses

    def product(self, x: fx.Node) -> fx.Node:
        """Product with the frozen matrix: a kernel whose backward needs no saved value."""
        return self.call(F.linear, x, self._frozen)

    def weights(self, group: int, count: int = 1, trains: bool = True, fills: bool = True) -> list[fx.Node]:
        """Matrices that are gathered together."""
        made = [self.add_weight(f"w{group}_{i}", group, trains=trains) for i in range(count)]
        for weight in made if fills else ():
            self.build.fill(weight, self._frozen)
        return made

    def timeline(self, *outputs: fx.Node, blocks: Sequence[range] = ()) -> Timeline:
        step = self.step(*outputs, fuses=self._fuses)
        block_of = {op: block for block in blocks for op in block}
        return Timeline(replace(step, blocks=block_of), RANKS, self._costs)


def _held(timeline: Timeline, **choices: Any) -> list[int]:
    """KiB held at each place."""
    return [size // 1024 for size in timeline.held(Choices(**choices))]


def _chain(*functions: Callable[..., Any], **kwargs: Any) -> tuple[_Forward, list[fx.Node]]:
    """A forward that applies functions in a chain; `F.linear` gets a frozen matrix."""
    forward = _Forward(**kwargs)
    made = [forward.x]
    for function in functions:
        made.append(forward.product(made[-1]) if function is F.linear else forward.call(function, made[-1]))
    return forward, made[1:]


def _of_chain(*functions: Callable[..., Any], **kwargs: Any) -> Timeline:
    forward, made = _chain(*functions, **kwargs)
    return forward.timeline(made[-1])


# Values and their gradients.


def test_result_that_a_kernel_makes_or_does_not_fuse_takes_memory() -> None:
    chain = torch.sin, torch.cos, F.linear
    assert _held(_of_chain(*chain, has_gradient=False)) == [0, 16, 32, 0, 0, 0]
    assert _held(_of_chain(*chain, has_gradient=False, fuses=False)) == [16, 32, 32, 0, 0, 0]
    assert _held(_of_chain(F.linear, torch.neg, has_gradient=False)) == [16, 32, 0, 0]


def test_result_with_two_readers_is_held_until_both_have_run() -> None:
    forward, (first,) = _chain(torch.sin, has_gradient=False)
    both = forward.call(torch.add, forward.call(torch.cos, first), forward.call(torch.exp, first))
    assert _held(forward.timeline(both)) == [16, 16, 16, 32, 0, 0, 0, 0]


def test_view_does_not_count_as_a_reader() -> None:
    forward, (first,) = _chain(torch.sin, has_gradient=False)
    last = forward.call(torch.cos, forward.build.call_method("view", first, -1))
    assert _held(forward.timeline(last)) == [0, 0, 16, 0, 0, 0]


def test_input_of_a_fused_op_is_held_until_the_fused_result_is_read() -> None:
    chain = F.linear, torch.neg, torch.exp, F.linear
    assert _held(_of_chain(*chain, has_gradient=False)) == [16, 16, 32, 32, 0, 0, 0, 0]


def test_result_is_held_until_an_in_place_op_has_written_it() -> None:
    forward, (first, last) = _chain(F.linear, F.linear, has_gradient=False)
    forward.build.call_method("add_", first, 1.0)
    assert _held(forward.timeline(last)) == [16, 32, 32, 0, 0, 0]


def test_graph_results_are_held_until_the_forward_ends() -> None:
    forward, made = _chain(F.linear, F.linear, F.linear, has_gradient=False)
    assert _held(forward.timeline(made[0], made[2])) == [16, 32, 48, 0, 0, 0]


def test_gradient_is_held_at_the_mirrored_places_of_its_value() -> None:
    chain = torch.sin, torch.cos, F.linear
    assert _held(_of_chain(*chain)) == [0, 16, 32, 32, 16, 16]


def test_saved_value_is_held_until_its_backward() -> None:
    # Dropout's result and its mask are saved; the backward holds one gradient per op.
    assert _held(_of_chain(F.dropout, torch.cos)) == [32, 48, 64, 32]


def test_recomputation_without_fusion_recomputes_all_sources() -> None:
    # The backward of cos recomputes the result of sin.
    assert _held(_of_chain(torch.sin, torch.cos, F.linear, fuses=False)) == [16, 32, 32, 32, 48, 16]
    # The backward of the second sin needs the result of cos, so it recomputes the first sin, too.
    chain = torch.sin, torch.cos, torch.sin, F.linear
    assert _held(_of_chain(*chain, fuses=False)) == [16, 32, 32, 32, 32, 64, 48, 16]


def test_sources_of_a_saved_value_are_not_recomputed_without_fusion() -> None:
    assert _held(_of_chain(torch.sin, F.linear, torch.cos, fuses=False)) == [16, 32, 32, 48, 32, 16]


def test_value_recomputed_inside_a_kernel_is_held_only_for_its_reader() -> None:
    """The kernel of the second sin's backward recomputes cos from the result of the first sin."""
    forward, (_, sine) = _chain(F.linear, torch.sin)
    other = forward.call(torch.sin, forward.call(torch.cos, sine))
    step = forward.timeline(forward.call(torch.add, forward.product(other), forward.product(sine)))
    assert _held(step) == [16, 32, 32, 48, 64, 64, 64, 64, 64, 64, 48, 64, 48, 16]


# Ops that the backward runs again.


def test_recomputed_op_also_recomputes_its_unsaved_sources() -> None:
    step = _of_chain(F.linear, torch.exp, F.linear)
    assert _held(step) == [16, 32, 32, 48, 48, 16]
    assert _held(step, recomputed={1}) == [16, 32, 32, 32, 64, 16]


def test_recomputed_source_is_held_until_its_own_backward() -> None:
    step = _of_chain(F.linear, torch.exp, F.linear, torch.exp, F.linear)
    assert _held(step, recomputed={3}) == [16, 32, 32, 48, 48, 48, 80, 48, 48, 16]
    assert _held(step, recomputed={1, 3}) == [16, 32, 32, 32, 32, 32, 96, 48, 48, 16]


def test_shared_source_is_recomputed_for_the_first_op_that_needs_it() -> None:
    forward, (product, _, second) = _chain(F.linear, torch.exp, F.linear)
    step = forward.timeline(forward.call(torch.add, second, forward.call(torch.exp, product)))
    assert _held(step, recomputed={1, 3}) == [16, 32, 48, 48, 48, 48, 80, 48, 48, 16]


def test_cheap_value_is_held_from_its_first_recomputation() -> None:
    """The second product runs again with the result of sin, which the backward of cos reads later."""
    forward, (_, sine) = _chain(F.linear, torch.sin)
    cosine = forward.call(torch.cos, sine)
    again = forward.call(torch.exp, forward.product(sine))
    step = forward.timeline(forward.call(torch.add, cosine, again))
    more = [b - a for a, b in zip(_held(step), _held(step, recomputed={4}), strict=True)]
    # exp's result is not held after the forward; its backward at 7 recomputes it from a product and a sine.
    assert more == [0, 0, 0, 0, 0, 0, -16, 32, 16, 0, 0, 0]


def test_statistics_of_a_recomputed_norm_are_not_held() -> None:
    forward, (product,) = _chain(F.linear, fuses=False)
    step = forward.timeline(forward.product(forward.call(F.layer_norm, product, (DIM,))))
    kept, again = step.held(Choices()), step.held(Choices(recomputed={1}))
    statistics = 2 * ROWS * 4
    assert step.step.internal == [0, statistics, 0]
    assert [(a - b) % (16 * 1024) for a, b in zip(kept, again, strict=True)] == [0, 0, *[statistics] * 3, 0]


# Checkpoints that the user placed: see [Note: Bodies of checkpoints].


def _exp_between(body: GraphBuilder, x: fx.Node, weight: fx.Node) -> fx.Node:
    """A product, exp and a product."""
    return body.call(F.linear, body.call(torch.exp, body.call(F.linear, x, weight)), weight)


def _gathered(body: GraphBuilder, x: fx.Node, weight: fx.Node) -> fx.Node:
    body.fill(weight, weight)
    last = _exp_between(body, x, weight)
    body.free(weight)
    return last


def _with_checkpoint(*bodies: Callable[..., fx.Node]) -> Timeline:
    """A product, checkpoints, and a product; the matrix of the checkpoints is sharded."""
    forward, (x,) = _chain(F.linear)
    (weight,) = forward.weights(0, fills=_gathered not in bodies)
    for body in bodies:
        x = checkpoint(forward.build, x, weight, body)
    return forward.timeline(forward.product(x))


def test_checkpoint_holds_the_peak_of_its_body_while_it_runs() -> None:
    step, several = _with_checkpoint(_exp_between), _with_checkpoint(_exp_between, _exp_between)
    # The body holds three activations at most: exp's result, its gradient, and the gradient of a product.
    assert [size // 16 for size in _held(step)] == [1, 5, 3, 3, 6, 1]
    assert len(several.step.bodies) == 2


def test_parameter_gathered_inside_a_checkpoint_is_held_only_inside() -> None:
    outside, inside = (_with_checkpoint(each) for each in (_exp_between, _gathered))
    assert _parameters(outside) != _parameters(inside)
    assert _parameters(inside)[0] == _parameters(inside)[2] == 0


def test_nested_checkpoint_saves_no_memory_while_the_outer_body_runs() -> None:
    def nested(body: GraphBuilder, x: fx.Node, weight: fx.Node) -> fx.Node:
        return checkpoint(body, checkpoint(body, x, weight, _exp_between), weight, _exp_between)

    def followed(body: GraphBuilder, x: fx.Node, weight: fx.Node) -> fx.Node:
        return body.call(F.linear, checkpoint(body, x, weight, _exp_between), weight)

    one, two = (_held(_with_checkpoint(each))[4] // 16 for each in (_exp_between, nested))
    # During the second's backward: the first's result, the gradients of both, and exp's result in the first.
    assert two - one == 4
    # The result of a nested checkpoint is saved inside the body.
    assert [size // 16 for size in _held(_with_checkpoint(followed))] == [1, 6, 3, 3, 7, 1]


def _read_behind_a_checkpoint(*readers: str, fuses: bool = True) -> list[int]:
    """Activations of a checkpoint, a chain of readers, and a product."""
    forward = _Forward(fuses=fuses)
    (weight,) = forward.weights(0)
    result = checkpoint(forward.build, forward.x, weight, _exp_between)
    for reader in readers:
        match reader:
            case "product":
                result = forward.call(F.linear, result, weight)
            case "scale":
                result = forward.call(torch.mul, result, forward.build.call_method("select", weight, 0, 0))
            case "sine":
                result = forward.call(torch.sin, result)
            case "checkpoint":
                result = checkpoint(forward.build, result, weight, _exp_between)
    return [size // 16 for size in _held(forward.timeline(forward.product(result)))]


def test_a_checkpoint_runs_again_where_its_result_is_needed() -> None:
    assert _read_behind_a_checkpoint("sine") == [4, 2, 2, 2, 5, 4]
    # The input of the next checkpoint is saved.
    assert _read_behind_a_checkpoint("checkpoint") == [4, 5, 3, 3, 6, 4]


def test_gradients_wait_for_a_checkpoint_whose_result_a_parameter_gradient_needs() -> None:
    # The product's gradient waits until the checkpoint's backward.
    assert _read_behind_a_checkpoint("product") == [4, 2, 2, 2, 5, 5]
    assert _read_behind_a_checkpoint("sine", "product") == [4, 2, 2, 3, 3, 3, 5, 4]
    assert _read_behind_a_checkpoint("scale", "sine") == [4, 1, 1, 2, 2, 2, 5, 4, 2, 4]
    assert _read_behind_a_checkpoint("scale", "scale", fuses=False) == [4, 1, 2, 1, 2, 2, 2, 6, 4, 5, 5, 7]
    assert _read_behind_a_checkpoint("product", "sine", "product") == [4, 2, 2, 3, 4, 4, 4, 3, 5, 5]


# Offloads to host memory.


def test_only_the_saved_result_of_an_op_is_offloaded_or_recomputed() -> None:
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
    """Activations held by cos of sin of a product.

    The backward of cos needs sin's result. The backward of sin needs the product, which may be offloaded.
    """
    forward = _Forward(**kwargs)
    (weight,) = forward.weights(0)
    sine = forward.call(torch.sin, forward.call(F.linear, forward.x, weight))
    last = forward.call(torch.add, forward.call(torch.cos, sine), sine)
    forward.build.free(weight)
    held = _held(forward.timeline(last), kept={0} if kept else set(), offloaded={0} if offloads else set())
    return [size // 16 for size in held]


def test_cheap_value_is_held_until_its_own_backward_if_no_gather_stands_between() -> None:
    assert _sine_of_product() == [1, 2, 1, 2, 2, 4, 4, 1]
    assert _sine_of_product(kept=False) == [1, 2, 1, 2, 2, 4, 3, 1]
    assert _sine_of_product(offloads=False) == [1, 2, 2, 3, 3, 4, 3, 1]
    assert _sine_of_product(fuses=False) == [1, 2, 2, 3, 3, 4, 3, 1]


def test_recomputed_kernel_result_is_held_only_for_its_readers() -> None:
    step = _of_chain(F.linear, torch.exp, F.linear, torch.sin)
    assert _held(step, offloaded={1}, recomputed={2}) == [16, 32, 32, 32, 64, 48, 48, 16]


# Parameters and their gradients: the bytes besides activations, in units of 512 bytes.


def _parameters(timeline: Timeline, **choices: Any) -> list[int]:
    return [size // 512 % 32 for size in timeline.held(Choices(**choices))]


def _two_modules(costs: Costs = COSTS, frees_first: bool = True, trains: bool = True) -> Timeline:
    """Two modules, each with two products with its matrix."""
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
    # A gradient is whole for one or two places, in flight for one place, and then stays as a shard.
    assert _parameters(_two_modules()) == [2, 4, 2, 2, 4, 7, 7, 6]


def test_slow_gather_is_launched_during_the_module_before() -> None:
    assert _parameters(_two_modules(SLOW)) == [4, 4, 2, 2, 6, 7, 7, 8]


def test_kept_group_is_held_from_its_gather_to_its_last_backward() -> None:
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


def test_parameters_gathered_in_one_pack_are_copied_out_of_it() -> None:
    step = _one_module()
    assert _parameters(step) == [8, 8, 10, 18]
    assert _parameters(step, kept={0}) == [8, 8, 6, 14]
    # Bytes of large packs count at every place, so their copies are not counted again.
    assert _parameters(step, kept={0}, has_large_packs=True) == [8, 8, 10, 18]


def test_a_parameter_that_no_op_reads_is_not_gathered() -> None:
    assert _parameters(_one_module(count=2, used=1)) == _parameters(_one_module(count=1, used=1))


def _within_products(*blocks: range, costs: Costs = COSTS) -> Timeline:
    """Six products, of which the middle two are with gathered matrices."""
    forward = _Forward(costs=costs)
    x = forward.product(forward.product(forward.x))
    for group in range(2):
        (weight,) = forward.weights(group)
        x = forward.call(F.linear, x, weight)
        forward.build.free(weight)
    return forward.timeline(forward.product(forward.product(x)), blocks=blocks)


def test_block_holds_its_parameters_and_their_gradients_from_end_to_end() -> None:
    assert _parameters(_within_products()) == [0, 0, 4, 2, 0, 0, 0, 0, 7, 8, 4, 2]
    assert _parameters(_within_products(range(1, 3), range(3, 5))) == [0, 4, 4, 2, 2, 0, 0, 4, 7, 7, 6, 4]


def test_slow_gather_is_launched_before_the_block_before() -> None:
    expected = [4, 4, 4, 2, 2, 2, 4, 4, 7, 7, 7, 8]
    assert _parameters(_within_products(range(3), range(3, 6), costs=SLOW)) == expected


def test_backward_of_a_block_holds_what_it_takes_to_its_end_if_its_ops_run_one_by_one() -> None:
    held = {}
    for fuses in (True, False):
        forward, made = _chain(F.linear, F.softplus, F.linear, F.linear, fuses=fuses)
        held[fuses] = _held(forward.timeline(made[-1], blocks=[range(4)]))
    # The backward of softplus reads the result of the first product.
    assert held == {True: [16, 32, 48, 48, 48, 48, 48, 16], False: [16, 32, 48, 48, 48, 48, 48, 32]}


# Seconds.


def test_the_backward_of_a_product_takes_twice_as_long() -> None:
    step = _of_chain(F.linear, torch.sin)
    assert step.backward_seconds == [2 * step.seconds[0], step.seconds[1]]
