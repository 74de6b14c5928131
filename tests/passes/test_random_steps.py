"""Whatever a step does, no pass changes what it computes: random graphs, run on two simulated ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from compile_fsdp.passes import (
    PASSES,
    Costs,
    Pipeline,
    pack_gathers,
    pack_reductions,
    remove_unread,
    remove_unshard_copies,
    schedule_collectives,
)
from compile_fsdp.passes.remove_unshard_copies import node_name
from compile_fsdp.passes.sequence import read_collectives
from execution import storage_sizes
from lockstep import run_ranks
from random_steps import RANKS, RandomStep, StepPlan, step_plans

NAMES = [each.__name__ for each in PASSES]

# 10,000 graphs take too long for every run of the tests.
MANY = pytest.mark.parametrize(
    "examples", [100, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(4 * 3600)])]
)


def costs_of(latency: int, pack: int) -> Costs:
    """A collective pays for `latency` bytes copied, or as many flops; a pack has at most `pack` bytes."""
    return Costs(latency, comm_bandwidth=pack / max(2 * latency, 1), memory_bandwidth=2.0, flops=1.0, rows=3)


costs = st.builds(costs_of, st.sampled_from([0, 8, 40, 10**6]), st.sampled_from([1, 16, 10**9]))


def copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


Outcome = tuple[list[list[torch.Tensor]], list[dict[str, int]]]


def outcome(step: RandomStep, graph: fx.Graph) -> Outcome:
    """By rank: results and inputs that mean something, and the sizes of the inputs' storages."""
    inputs = [step.inputs(rank) for rank in range(RANKS)]
    results = run_ranks(graph, inputs)
    tensors = [own + [each[name] for name in step.defined()] for own, each in zip(results, inputs, strict=True)]
    return tensors, [storage_sizes(each) for each in inputs]


def assert_same(expected: Outcome, got: Outcome) -> None:
    assert expected[1] == got[1]
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0)


def nodes_of(graph: fx.Graph) -> list[object]:
    return [(node, node.target, node.args, node.kwargs) for node in graph.nodes]


@MANY
def test_no_pass_changes_what_a_step_computes(examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(step_plans, costs, st.booleans(), st.booleans())
    def check(plan: StepPlan, costs: Costs, hoist: bool, merge: bool) -> None:
        step = RandomStep(StepPlan(plan.groups, plan.actions))
        expected = outcome(step, step.graph)
        runs: dict[str, Callable[[fx.Graph], object]] = {
            "remove_unshard_copies": remove_unshard_copies,
            "remove_unread": remove_unread,
            "pack_gathers": lambda graph: pack_gathers(graph, merge=merge, costs=costs),
            "pack_reductions": lambda graph: pack_reductions(graph, merge=merge, costs=costs),
            "schedule_collectives": lambda graph: schedule_collectives(graph, hoist=hoist, costs=costs),
        }
        for name, run in runs.items():
            graph = copied(step.graph)
            run(graph)
            graph.lint()
            assert_same(expected, outcome(step, graph))
            if name != "schedule_collectives":  # What it has placed is traced at another place.
                before = nodes_of(graph)
                run(graph)
                assert nodes_of(graph) == before, name

    check()


@MANY
def test_the_pipeline_does_not_change_what_a_step_computes(examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(step_plans, costs, st.frozensets(st.sampled_from(NAMES), max_size=2), st.booleans(), st.booleans())
    def check(plan: StepPlan, costs: Costs, disabled: frozenset[str], hoist: bool, merge: bool) -> None:
        step = RandomStep(plan)
        expected = outcome(step, step.graph)
        Pipeline(node_name, lambda reports: None, disabled, hoist=hoist, merge=merge, costs=costs)(step.graph)
        assert_same(expected, outcome(step, step.graph))

    check()


@MANY
def test_ranks_with_other_batches_issue_the_same_collectives(examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(step_plans, costs, st.booleans(), st.booleans(), st.sampled_from([1, 80, 5000]))
    def check(plan: StepPlan, costs: Costs, hoist: bool, merge: bool, rows: int) -> None:
        issued = []
        for each in (3, rows):
            graph = RandomStep(plan, each).graph
            Pipeline(node_name, lambda reports: None, hoist=hoist, merge=merge, costs=costs)(graph)
            issued.append(read_collectives(graph))
        assert issued[0] == issued[1]

    check()
