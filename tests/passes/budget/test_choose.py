"""Fit of a step into a budget: groups that are kept, and ops that are recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from compile_fsdp.passes import Costs
from compile_fsdp.passes.budget.choose import Choice, find_choices, fit
from compile_fsdp.passes.budget.read_step import read_step
from compile_fsdp.passes.budget.step_memory import Choices
from compile_fsdp.passes.budget.timeline import Timeline
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision, fit_memory_budget
from helpers.graphs.blocks import COSTS, DIM, RANKS, UNLIMITED, blocks
from helpers.graphs.render import render_calls


def timeline(rows: int, **kwargs: Any) -> Timeline:
    graph, parameters = blocks(rows, **kwargs)
    return Timeline(read_step(graph, parameters), RANKS, COSTS)


def test_unlimited_budget_keeps_all_groups_and_recomputes_nothing() -> None:
    step = timeline(rows=256)
    found = fit(step, UNLIMITED)
    assert found.choices == Choices(kept=frozenset({0, 1, 2}), has_large_packs=True)
    assert found.made == ()
    assert found.peak == found.fastest == step.peak(found.choices)


@given(st.integers(1, 512), st.lists(st.integers(0, 10**6), min_size=2, max_size=2), st.sampled_from([True, False]))
def test_more_budget_is_never_slower_and_never_exceeded(rows: int, budgets: list[int], fuses: bool) -> None:
    graph, parameters = blocks(rows)
    step = Timeline(read_step(graph, parameters, fuses=fuses), RANKS, COSTS)
    smallest = fit(step, 0).peak
    less, more = (fit(step, smallest + budget) for budget in sorted(budgets))
    for found, budget in ((less, min(budgets)), (more, max(budgets))):
        assert found.fits
        assert found.peak <= smallest + budget
        assert max(step.held(found.choices)) == found.peak
    assert sum(choice.seconds for choice in more.made) <= sum(choice.seconds for choice in less.made)
    assert set(more.made) <= set(less.made)
    assert not fit(step, smallest - 1).fits


@given(st.integers(1, 512), st.floats(0, 1))
def test_no_choice_is_made_without_need(rows: int, share: float) -> None:
    step = timeline(rows, count=12)

    def choices_of(made: Sequence[Choice]) -> Choices:
        return Choices(
            kept=set(range(12)) - {each.group for each in made},
            recomputed={each.op for each in made if each.op >= 0},
            has_large_packs=not any(each.op < 0 and each.group < 0 for each in made),
        )

    least, most = fit(step, 0).peak, fit(step, UNLIMITED).peak
    budget = int(least + share * (most - least))
    found = fit(step, budget)
    assert found.peak <= budget
    assert found.choices == choices_of(found.made)
    if found.made:
        assert step.peak(choices_of(found.made[:-1])) > budget


def test_step_saves_the_activations_that_the_partitioner_saves() -> None:
    rows = 256
    graph, parameters = blocks(rows)
    step = read_step(graph, parameters)
    saved = {step.ops[value.made_at].name: value.size for value in step.values if value.is_saved}
    hidden = rows * 4 * DIM * 4
    # per block gelu's input, and its result for a product's backward; for two blocks the block's input
    assert sorted(saved.values()) == sorted([hidden] * 6 + [rows * DIM * 4] * 2)


def test_cheap_results_are_computed_again_before_products() -> None:
    step = timeline(rows=4096)
    choices = [choice for choice in find_choices(step) if choice.op >= 0]
    by_op = {step.step.ops[choice.op].target: choice.seconds / choice.size for choice in choices}
    assert by_op[F.gelu] < by_op[F.linear]


def test_result_that_another_module_reads_is_not_run_again() -> None:
    step = timeline(rows=256)
    again = {step.step.ops[choice.op].target for choice in find_choices(step) if choice.op >= 0}
    assert torch.add not in again


def test_ops_inside_a_users_checkpoint_are_no_choices() -> None:
    step = timeline(rows=256, checkpointed=1)
    again = [choice.op for choice in find_choices(step) if step.step.ops[choice.op].target is F.gelu]
    assert len(again) == 2


def test_step_without_trained_parameters_fits_in_less_memory() -> None:
    found = fit(timeline(rows=256, trains=False), UNLIMITED)
    assert found.fits
    assert found.peak < fit(timeline(rows=256), UNLIMITED).peak


def test_a_group_that_is_filled_twice_is_not_kept() -> None:
    graph, parameters = blocks(rows=4)
    first = next(iter(parameters))
    fills = [node for node in graph.nodes if node.args and node.args[0] is first and "copy_" in str(node.target)]
    with graph.inserting_after(fills[0]):
        graph.call_function(fills[0].target, fills[0].args)
    found = fit(Timeline(read_step(graph, parameters), RANKS, COSTS), UNLIMITED)
    assert found.choices.kept == {1, 2}


def test_group_that_the_backward_does_not_gather_is_neither_kept_nor_read_again() -> None:
    graph, parameters = blocks(rows=256)
    parameters = {node: replace(each, unshards_in_backward=each.group != 1) for node, each in parameters.items()}
    step = read_step(graph, parameters)
    timeline = Timeline(step, RANKS, COSTS)
    assert fit(timeline, UNLIMITED).choices.kept == {0, 2}
    again = [choice.op for choice in find_choices(timeline) if step.ops[max(choice.op, 0)].target is F.linear]
    assert again
    assert not any(group.number == 1 for op in again for group in step.read[op])


def test_decision_prints_groups_ops_bytes_and_time() -> None:
    decided = BudgetDecision((0,), (1,), False, 4, 2**20, 2**19, 0.002, True)
    assert str(decided) == (
        "memory budget: 1 group kept, 1 of 4 ops computed again; about 512 KiB, where the fastest step takes 1 MiB "
        "and 2.0 ms less"
    )
    assert "1 group kept, in large packs, 1 of 4" in str(replace(decided, has_large_packs=True))


def test_graph_is_changed_as_decided() -> None:
    graph, parameters = blocks(rows=256, count=1)
    decided = BudgetDecision((0,), (1,), False, 4, 2**20, 2**19, 0.0, True)
    fit_memory_budget(graph, parameters, RANKS, UNLIMITED, COSTS, lambda possible: decided)
    assert [node.target for node in graph.nodes if "recompute" in node.meta] == [F.gelu]
    assert_expected_inline(render_calls(graph), """\
resize_storage_bytes_(w0_0, 4096)
copy_(w0_0, v0)
resize_storage_bytes_(w0_1, 4096)
copy_(w0_1, v1)
%0: f32[256, 64] = linear(x, w0_0)
%1: f32[256, 64] = gelu(%0)
%2: f32[256, 16] = linear(%1, w0_1)
%3: f32[256, 16] = add(x, %2)
%4: f32[] = sum(%3)
return (%4,)
""")


@pytest.mark.parametrize("budget", [0, 400_000, UNLIMITED])
def test_settle_gets_the_decision_that_is_applied(budget: int) -> None:
    graph, parameters = blocks(rows=256)
    settle = mock.Mock(side_effect=itemgetter(0))
    decision = fit_memory_budget(graph, parameters, RANKS, budget, COSTS, settle)
    (proposed,) = settle.call_args.args
    assert [decision] == [*proposed]
    assert decision.fits is (budget > 0)
    assert not decision.fits or decision.peak_bytes <= budget * 1.0001
    frees = [node for node in graph.nodes if "resize" in str(node.target) and node.args[1] == 0]
    assert len(frees) == 2 * (3 - len(decision.kept))


def _possible(budget: int, *, costs: Costs = COSTS, count: int = 3) -> list[BudgetDecision]:
    """Return the decisions about a graph whose blocks may become calls."""
    graph, parameters = blocks(rows=256, count=count, activations=3)
    settle = mock.Mock(side_effect=itemgetter(0))
    fit_memory_budget(graph, parameters, RANKS, budget, costs, settle, calls_blocks=True)
    return [*settle.call_args.args[0]]


def test_blocks_are_called_within_a_large_budget_and_not_within_the_smallest() -> None:
    best, other = _possible(UNLIMITED)
    assert (best.calls_blocks, other.calls_blocks) == (True, False)
    smallest = min(each.peak_bytes for each in _possible(0))
    best, other = _possible(smallest + 100)
    assert (best.calls_blocks, other.calls_blocks) == (False, True)
    assert best.fits and not other.fits
    assert other.peak_bytes > best.peak_bytes


def test_blocks_are_not_called_if_they_need_more_gathers_and_recomputation() -> None:
    best, other = _possible(320_000)
    assert (best.calls_blocks, other.calls_blocks) == (False, True)
    assert best.fits and other.fits
    assert other.seconds > 2 * best.seconds


def test_called_blocks_offload_nothing() -> None:
    costs = replace(COSTS, latency=1e-9, offload_bandwidth=1e12)
    offloaded = {each.calls_blocks: bool(each.offloaded) for each in _possible(0, costs=costs)}
    assert offloaded == {True: False, False: True}


def test_graph_without_equal_blocks_has_one_decision() -> None:
    assert [each.calls_blocks for each in _possible(UNLIMITED, count=1)] == [False]
