"""Ops that the backward may run again, and groups that it may gather again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from compile_fsdp.passes.budget.choose import Choice, find_choices, ops_run_again
from compile_fsdp.passes.budget.step_memory import Step
from compile_fsdp.passes.budget.timeline import Timeline
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision, fit_memory_budget
from compile_fsdp.torch_compat.dynamo import recomputation
from helpers.graphs.blocks import COSTS, DIM, RANKS, Forward, saved_ops
from helpers.graphs.build import checkpoint

Call = Callable[..., fx.Node]
Body = Callable[[Call, fx.Node, fx.Node], fx.Node]


class Modules(Forward):
    """A forward of modules, the next of `x`; each group is gathered and freed around its use."""

    def module(self, body: Body, frees: bool = True, fills: bool = True, rows: int = DIM) -> fx.Node:
        """Add a module with one matrix; its body gets a function that adds a call, the input and the matrix."""
        group = len(self.parameters)
        weight, value = self.add_weight(f"w{group}", group, (rows, DIM)), self.build.input(f"v{group}", (rows, DIM))
        if fills:
            self.build.fill(weight, value)
        self.x = body(self.call, self.x, weight)
        if frees:
            self.build.free(weight)
        return self.x

    def choices(self, *outputs: fx.Node) -> tuple[Step, list[Choice]]:
        """The step of the graph that returns the sum of the last result, and its choices."""
        step = self.step(self.call(torch.sum, self.x), *outputs)
        return step, list(find_choices(Timeline(step, RANKS, COSTS)))


def choices_of(body: Body, **options: Any) -> tuple[Step, list[Choice]]:
    """Step and choices of a forward of one module."""
    forward = Modules()
    forward.module(body, **options)
    return forward.choices()


def again(step: Step, choices: Sequence[Choice]) -> list[Any]:
    """Targets of the ops that may run again."""
    return [step.ops[choice.op].target for choice in choices if choice.op >= 0]


def product(call: Call, x: fx.Node, w: fx.Node) -> fx.Node:
    return call(F.linear, x, w)


def between_products(op: Callable[..., Any]) -> Body:
    return lambda call, x, w: call(F.linear, call(op, call(F.linear, x, w)), w)


def test_group_that_is_never_freed_is_no_choice() -> None:
    forward = Modules()
    for frees in (True, False):
        forward.module(product, frees)
    _, found = forward.choices()
    assert [choice.group for choice in found if choice.group >= 0] == [0]


@pytest.mark.parametrize("options", [{"fills": False}, {"rows": 0}], ids=["filled by another graph", "empty"])
def test_group_without_a_gather_is_no_choice(options: dict[str, Any]) -> None:
    _, found = choices_of(product, **options)
    assert all(choice.size for choice in found)
    assert not any(choice.group >= 0 for choice in found)


def test_a_forward_that_reads_no_parameter_has_no_packs() -> None:
    _, found = choices_of(lambda call, x, w: call(torch.sin, x))
    assert all(choice.size for choice in found)
    assert not any(choice.op < 0 for choice in found)


def _random(call: Call, x: fx.Node, w: fx.Node) -> fx.Node:
    return call(F.linear, call(F.dropout, call(F.linear, x, w), 0.5), w)


def _from_random(call: Call, x: fx.Node, w: fx.Node) -> fx.Node:
    return call(F.linear, call(torch.mul, call(torch.add, x, call(torch.rand_like, x)), 2.0), w)


@pytest.mark.parametrize(("body", "op"), [(_random, F.dropout), (_from_random, torch.mul)])
def test_random_op_and_reader_of_an_unsaved_random_result_are_not_run_again(body: Body, op: Any) -> None:
    step, found = choices_of(body)
    assert op in saved_ops(step)
    assert op not in again(step, found)


def test_op_whose_result_the_graph_returns_is_not_run_again() -> None:
    step, found = choices_of(between_products(F.gelu))
    assert F.gelu in again(step, found)

    forward = Modules()
    forward.module(between_products(F.gelu))
    hidden = next(node for node in forward.build.graph.nodes if node.target is F.gelu)
    step, found = forward.choices(hidden)
    assert F.gelu not in again(step, found)


def test_op_that_reads_the_parameter_of_another_module_is_not_run_again() -> None:
    """The second module also computes with the matrix of the first module."""
    forward = Modules()
    forward.module(product, frees=False)
    (first,) = (node for node in forward.build.graph.find_nodes(op="placeholder") if node.name == "w0")
    forward.module(lambda call, x, w: call(F.linear, call(F.gelu, call(F.linear, x, first)), w))
    forward.build.free(first)
    step, found = forward.choices()
    products = [choice.op for choice in found if choice.op >= 0 and step.ops[choice.op].target is F.linear]
    assert not any(group.number == 0 for op in products for group in step.read[op] if op > 0)


def test_op_that_needs_an_unsaved_value_of_another_module_is_not_run_again() -> None:
    """A cheap result of the first module is not saved, and the second module computes with it."""

    def first(call: Call, x: fx.Node, w: fx.Node) -> fx.Node:
        call(torch.neg, x)
        return product(call, x, w)

    forward = Modules()
    forward.module(first)
    (cheap,) = forward.build.graph.find_nodes(op="call_function", target=torch.neg)
    forward.module(lambda call, x, w: call(F.linear, call(torch.mul, call(torch.cos, cheap), 2.0), w))
    step, found = forward.choices()
    assert torch.mul in saved_ops(step) and torch.neg not in saved_ops(step)
    assert torch.mul not in again(step, found)


def test_cost_includes_a_product_that_must_run_first() -> None:
    """Running neg again runs the product again, too, because the product is not saved."""
    step, found = choices_of(between_products(torch.neg))
    seconds = {step.ops[choice.op].target: choice.seconds for choice in found if choice.op >= 0}
    assert [op.target for op in step.ops[:2]] == [F.linear, torch.neg]
    assert seconds[torch.neg] > Timeline(step, RANKS, COSTS).seconds[0]


def test_cost_excludes_a_cheap_op_that_must_run_first() -> None:
    """A cheap op runs in the kernel of its reader."""
    step, found = choices_of(lambda call, x, w: call(F.linear, call(torch.sin, call(torch.cos, x)), w))
    assert step.ops[1].target is torch.sin
    assert [choice.seconds for choice in found if choice.op == 1] == [Timeline(step, RANKS, COSTS).seconds[1]]
    assert torch.cos not in again(step, found)  # its result is not saved


def test_cost_includes_a_product_with_two_readers_once() -> None:
    def body(call: Call, x: fx.Node, w: fx.Node) -> fx.Node:
        hidden = call(F.linear, x, w)
        return call(F.linear, call(torch.sub, call(torch.neg, hidden), call(torch.mul, hidden, 2.0)), w)

    step, found = choices_of(body)
    seconds = Timeline(step, RANKS, COSTS).seconds
    at = {op.target: at for at, op in reversed(list(enumerate(step.ops)))}
    expected = seconds[at[torch.sub]] + seconds[at[F.linear]]
    assert [choice.seconds for choice in found if choice.op == at[torch.sub]] == [expected]


def test_op_whose_parameter_stays_unsharded_may_run_again() -> None:
    step, found = choices_of(between_products(F.gelu), frees=False)
    assert F.linear in again(step, found)


def test_op_that_reads_the_result_of_a_checkpoint_may_run_again() -> None:
    """The result is not saved, but the checkpoint runs again where it is needed."""
    forward = Modules()
    forward.module(lambda _, x, w: checkpoint(forward.build, x, w, lambda body, *given: product(body.call, *given)))
    forward.module(between_products(F.gelu))
    step, found = forward.choices()
    assert F.linear in again(step, found)


def test_choices_are_named_by_op_and_module() -> None:
    def body(call: Call, x: fx.Node, w: fx.Node) -> fx.Node:
        hidden = call(F.linear, x, w)
        hidden.meta["nn_module_stack"] = {"": ("L['self'].blocks._modules['0'].up", torch.nn.Linear)}
        return call(F.linear, call(F.gelu, hidden), w)

    _, found = choices_of(body)
    assert {"run gelu again", "run linear of blocks.0.up again"} <= {choice.name for choice in found}


def test_op_that_runs_again_takes_along_what_the_backward_does_not_have() -> None:
    step, _ = choices_of(between_products(torch.tanh))
    assert saved_ops(step) == {torch.tanh}
    assert [step.ops[at].target for at in sorted(ops_run_again(step, 1))] == [F.linear, torch.tanh]


def test_ops_that_a_recomputed_op_needs_are_marked_too() -> None:
    forward = Modules()
    forward.module(between_products(torch.tanh))
    graph = forward.build.output(forward.call(torch.sum, forward.x))
    decided = BudgetDecision((), (1,), False, 4, 2**20, 2**19, 0.0, True)
    fit_memory_budget(graph, forward.parameters, RANKS, 2**20, COSTS, lambda possible: decided)
    marked = [node.target for node in graph.nodes if recomputation(node) is not None]
    assert marked == [F.linear, torch.tanh]  # the product whose result only tanh reads
