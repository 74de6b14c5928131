"""Ops that the backward may run again, and groups that it may gather again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from compile_fsdp.passes import Costs
from compile_fsdp.passes.budget.choose import Choice, find_choices
from compile_fsdp.passes.budget.read_step import read_step
from compile_fsdp.passes.budget.step_memory import Sharding, Step
from compile_fsdp.passes.budget.timeline import Timeline
from helpers.graphs.build import GraphBuilder, checkpoint

COSTS = Costs(latency=1e-3, comm_bandwidth=1e9, memory_bandwidth=1e10, flops=1e9)
RANKS, ROWS, DIM = 2, 256, 16

Body = Callable[..., fx.Node]


class Forward:
    """A forward of modules; each group is gathered and freed around its use.

    Attributes:
        build: The graph under construction.
        x: Input of the next module.
    """

    def __init__(self) -> None:
        self.build = GraphBuilder(meta_key="example_value")
        with self.build.fake_mode:
            self.x = self.build.input_like("x", torch.empty(ROWS, DIM))
        self._parameters: dict[fx.Node, Sharding] = {}
        self._groups = 0

    def module(self, body: Body, frees: bool = True, fills: bool = True, rows: int = DIM) -> fx.Node:
        """Add a module with one matrix; its body gets the input and the matrix."""
        build = self.build
        with build.fake_mode:
            weight = build.input_like(f"w{self._groups}", torch.empty(rows, DIM, requires_grad=True))
            value = build.input_like(f"v{self._groups}", torch.empty(rows, DIM))
        size = build.value(weight).nbytes
        self._parameters[weight] = Sharding(self._groups, size // RANKS, size)
        self._groups += 1
        if fills:
            build.fill(weight, value)
        self.x = body(self.x, weight)
        if frees:
            build.free(weight)
        return self.x

    def call(self, *args: Any) -> fx.Node:
        return self.build.call(*args)

    def choices(self, *outputs: fx.Node) -> tuple[Step, list[Choice]]:
        step = read_step(self.build.output(*outputs), self._parameters)
        return step, list(find_choices(Timeline(step, RANKS, COSTS)))


def targets(step: Step, choices: Sequence[Choice]) -> list[Any]:
    return [step.ops[choice.op].target for choice in choices if choice.op >= 0]


def test_group_that_is_never_freed_is_no_choice() -> None:
    forward = Forward()
    for frees in (True, False):
        forward.module(lambda x, w: forward.call(F.linear, x, w), frees)
    _, found = forward.choices(forward.call(torch.sum, forward.x))
    assert [choice.group for choice in found if choice.group >= 0] == [0]


def test_group_that_another_graph_fills_is_no_choice() -> None:
    forward = Forward()
    forward.module(lambda x, w: forward.call(F.linear, x, w), fills=False)
    _, found = forward.choices(forward.call(torch.sum, forward.x))
    assert all(choice.size for choice in found)
    assert not any(choice.group >= 0 for choice in found)


def test_an_empty_parameter_is_no_choice() -> None:
    forward = Forward()
    forward.module(lambda x, w: forward.call(F.linear, x, w), rows=0)
    _, found = forward.choices(forward.call(torch.sum, forward.x))
    assert not any(choice.group >= 0 for choice in found)


def test_a_forward_that_reads_no_parameter_has_no_packs() -> None:
    forward = Forward()
    forward.module(lambda x, w: forward.call(torch.sin, x))
    _, found = forward.choices(forward.call(torch.sum, forward.x))
    assert all(choice.size for choice in found)
    assert not any(choice.op < 0 for choice in found)


def test_a_random_op_is_not_run_again() -> None:
    forward = Forward()

    def body(x: fx.Node, w: fx.Node) -> fx.Node:
        hidden = forward.call(F.dropout, forward.call(F.linear, x, w), 0.5)
        return forward.call(F.linear, hidden, w)

    forward.module(body)
    step, found = forward.choices(forward.call(torch.sum, forward.x))
    saved = {step.ops[value.made_at].target for value in step.values if value.is_saved}
    assert F.dropout in saved or any(step.internal)
    assert F.dropout not in targets(step, found)


def test_op_that_needs_an_unsaved_random_result_is_not_run_again() -> None:
    forward = Forward()

    def body(x: fx.Node, w: fx.Node) -> fx.Node:
        noise = forward.call(torch.rand_like, x)
        hidden = forward.call(torch.mul, forward.call(torch.add, x, noise), 2.0)
        return forward.call(F.linear, hidden, w)

    forward.module(body)
    step, found = forward.choices(forward.call(torch.sum, forward.x))
    assert torch.mul in {step.ops[value.made_at].target for value in step.values if value.is_saved}
    assert torch.mul not in targets(step, found)


def test_op_whose_result_the_graph_returns_is_not_run_again() -> None:
    forward = Forward()
    hidden: list[fx.Node] = []

    def body(x: fx.Node, w: fx.Node) -> fx.Node:
        hidden.append(forward.call(F.gelu, forward.call(F.linear, x, w)))
        return forward.call(F.linear, hidden[0], w)

    forward.module(body)
    inner, found = forward.choices(forward.call(torch.sum, forward.x))
    assert F.gelu in targets(inner, found)

    forward = Forward()
    hidden.clear()
    forward.module(body)
    outer, found = forward.choices(forward.call(torch.sum, forward.x), hidden[0])
    assert F.gelu not in targets(outer, found)


def test_op_that_reads_the_parameter_of_another_module_is_not_run_again() -> None:
    """The second module also computes with the matrix of the first module."""
    forward = Forward()
    first: list[fx.Node] = []

    def body(x: fx.Node, w: fx.Node) -> fx.Node:
        first.append(w)
        return forward.call(F.linear, x, w)

    forward.module(body, frees=False)

    def second(x: fx.Node, w: fx.Node) -> fx.Node:
        hidden = forward.call(F.linear, x, first[0])
        return forward.call(F.linear, forward.call(F.gelu, hidden), w)

    forward.module(second)
    forward.build.free(first[0])
    step, found = forward.choices(forward.call(torch.sum, forward.x))
    again = [choice.op for choice in found if choice.op >= 0 and step.ops[choice.op].target is F.linear]
    assert not any(group.number == 0 for op in again for group in step.read[op] if op > 0)


def test_op_that_needs_an_unsaved_value_of_another_module_is_not_run_again() -> None:
    """A cheap result of the first module is not saved, and the second module computes with it."""
    forward = Forward()
    cheap: list[fx.Node] = []

    def first(x: fx.Node, w: fx.Node) -> fx.Node:
        cheap.append(forward.call(torch.neg, x))
        return forward.call(F.linear, x, w)

    def second(x: fx.Node, w: fx.Node) -> fx.Node:
        return forward.call(F.linear, forward.call(torch.mul, forward.call(torch.cos, cheap[0]), 2.0), w)

    forward.module(first)
    forward.module(second)
    step, found = forward.choices(forward.call(torch.sum, forward.x))
    values = {step.ops[value.made_at].target: value for value in step.values}
    assert values[torch.mul].is_saved
    assert not values[torch.neg].is_saved
    assert torch.mul not in targets(step, found)


def test_cost_includes_a_product_that_must_run_first() -> None:
    """Running neg again runs the product again, too, because the product is not saved."""
    forward = Forward()

    def body(x: fx.Node, w: fx.Node) -> fx.Node:
        hidden = forward.call(torch.neg, forward.call(F.linear, x, w))
        return forward.call(F.linear, hidden, w)

    forward.module(body)
    step, found = forward.choices(forward.call(torch.sum, forward.x))
    seconds = {step.ops[choice.op].target: choice.seconds for choice in found if choice.op >= 0}
    timeline = Timeline(step, RANKS, COSTS)
    products = [timeline.seconds[at] for at, op in enumerate(step.ops) if op.target is F.linear]
    assert seconds[torch.neg] > products[0]


def test_cost_excludes_a_cheap_op_that_must_run_first() -> None:
    """A cheap op runs in the kernel of its reader."""
    forward = Forward()

    def body(x: fx.Node, w: fx.Node) -> fx.Node:
        hidden = forward.call(torch.sin, forward.call(torch.cos, x))
        return forward.call(F.linear, hidden, w)

    forward.module(body)
    step, found = forward.choices(forward.call(torch.sum, forward.x))
    timeline = Timeline(step, RANKS, COSTS)
    at = next(at for at, op in enumerate(step.ops) if op.target is torch.sin)
    assert [choice.seconds for choice in found if choice.op == at] == [timeline.seconds[at]]
    assert torch.cos not in targets(step, found)  # its result is not saved


def test_cost_includes_a_product_with_two_readers_once() -> None:
    forward = Forward()

    def body(x: fx.Node, w: fx.Node) -> fx.Node:
        hidden = forward.call(F.linear, x, w)
        both = forward.call(torch.sub, forward.call(torch.neg, hidden), forward.call(torch.mul, hidden, 2.0))
        return forward.call(F.linear, both, w)

    forward.module(body)
    step, found = forward.choices(forward.call(torch.sum, forward.x))
    timeline = Timeline(step, RANKS, COSTS)
    at = {op.target: at for at, op in reversed(list(enumerate(step.ops)))}
    expected = timeline.seconds[at[torch.sub]] + timeline.seconds[at[F.linear]]
    assert [choice.seconds for choice in found if choice.op == at[torch.sub]] == [expected]


def test_op_whose_parameter_stays_unsharded_may_run_again() -> None:
    forward = Forward()

    def body(x: fx.Node, w: fx.Node) -> fx.Node:
        return forward.call(F.linear, forward.call(F.gelu, forward.call(F.linear, x, w)), w)

    forward.module(body, frees=False)
    step, found = forward.choices(forward.call(torch.sum, forward.x))
    assert F.linear in targets(step, found)


def test_op_that_reads_the_result_of_a_checkpoint_may_run_again() -> None:
    """The result is not saved, but the checkpoint runs again where it is needed."""
    forward = Forward()

    def product(body: GraphBuilder, x: fx.Node, w: fx.Node) -> fx.Node:
        return body.call(F.linear, x, w)

    def body(x: fx.Node, w: fx.Node) -> fx.Node:
        return forward.call(F.linear, forward.call(F.gelu, forward.call(F.linear, x, w)), w)

    forward.module(lambda x, w: checkpoint(forward.build, x, w, product))
    forward.module(body)
    step, found = forward.choices(forward.call(torch.sum, forward.x))
    assert F.linear in targets(step, found)


def test_choices_are_named_by_op_and_module() -> None:
    forward = Forward()

    def body(x: fx.Node, w: fx.Node) -> fx.Node:
        hidden = forward.call(F.linear, x, w)
        hidden.meta["nn_module_stack"] = {"": ("L['self'].blocks._modules['0'].up", torch.nn.Linear)}
        return forward.call(F.linear, forward.call(F.gelu, hidden), w)

    forward.module(body)
    _, found = forward.choices(forward.call(torch.sum, forward.x))
    assert {"run gelu again", "run linear of blocks.0.up again"} <= {choice.name for choice in found}
