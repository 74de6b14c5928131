"""No pass changes the results of a step: random graphs, run on two simulated ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch import fx

from compile_fsdp.passes import PASSES, Costs, Pipeline, pipelines
from compile_fsdp.passes.analysis.sequence import read_collectives
from compile_fsdp.passes.post_grad.packing import Merge
from compile_fsdp.passes.post_grad.schedule_collectives import schedule_collectives
from compile_fsdp.passes.report import node_name
from compile_fsdp.passes.runner import function_of
from helpers.graphs.execution import storage_sizes
from helpers.graphs.fuzzing import MANY, fuzz
from helpers.graphs.lockstep import run_ranks
from helpers.graphs.random_steps import RANKS, Action, GroupPlan, RandomStep, StepPlan, step_plans

NAMES = [each.__name__ for each in PASSES]


def costs_of(latency: int, pack: int) -> Costs:
    """A collective costs as much as `latency` copied bytes or flops; a pack has at most `pack` bytes."""
    return Costs(latency, comm_bandwidth=pack / max(2 * latency, 1), memory_bandwidth=2.0, flops=1.0, rows=3)


costs = st.builds(costs_of, st.sampled_from([0, 8, 40, 10**6]), st.sampled_from([1, 16, 10**9]))


def copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


Outcome = tuple[list[list[torch.Tensor]], list[dict[str, int]]]


def outcome(step: RandomStep, graph: fx.Graph) -> Outcome:
    """By rank: results, inputs with defined data, and sizes of the inputs' storages."""
    inputs = [step.inputs(rank) for rank in range(RANKS)]
    results = run_ranks(graph, inputs)
    tensors = [own + [each[name] for name in step.defined()] for own, each in zip(results, inputs, strict=True)]
    return tensors, [storage_sizes(each) for each in inputs]


def assert_same(expected: Outcome, got: Outcome) -> None:
    assert expected[1] == got[1]
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0)


def nodes_of(graph: fx.Graph) -> list[object]:
    return [(node, node.target, node.args, node.kwargs) for node in graph.nodes]


def check_each_pass(plan: StepPlan, costs: Costs, hoist: bool, merge: Merge) -> None:
    step = RandomStep(plan)
    expected = outcome(step, step.graph)
    for run in pipelines.post_grad(node_name, hoist=hoist, merge=merge, costs=costs):
        graph = copied(step.graph)
        run(graph)
        graph.lint()
        assert_same(expected, outcome(step, graph))
        if function_of(run) is not schedule_collectives:  # A second run takes the scheduled places for traced places.
            before = nodes_of(graph)
            run(graph)
            assert nodes_of(graph) == before, run


def check_pipeline(plan: StepPlan, costs: Costs, disabled: frozenset[str], hoist: bool, merge: Merge) -> None:
    step = RandomStep(plan)
    expected = outcome(step, step.graph)
    passes = pipelines.post_grad(node_name, hoist=hoist, merge=merge, costs=costs)
    Pipeline(passes, lambda reports: None, disabled)(step.graph)
    assert_same(expected, outcome(step, step.graph))


def check_order(plan: StepPlan, costs: Costs, hoist: bool, merge: Merge, rows: int) -> None:
    """Ranks whose batches have 3 and `rows` rows issue equal collectives."""
    issued = []
    passes = pipelines.post_grad(node_name, hoist=hoist, merge=merge, costs=costs)
    for each in (3, rows):
        graph = RandomStep(plan, each).graph
        Pipeline(passes, lambda reports: None)(graph)
        issued.append(read_collectives(graph))
    assert issued[0] == issued[1]


@MANY
def test_no_pass_changes_the_results_of_a_step(examples: int) -> None:
    unnamed = step_plans.map(lambda plan: replace(plan, is_named=False))  # as the pipeline hands them to the passes
    fuzz(check_each_pass, examples, unnamed, costs, st.booleans(), st.sampled_from(Merge))


@MANY
def test_the_pipeline_does_not_change_the_results_of_a_step(examples: int) -> None:
    disabled = st.frozensets(st.sampled_from(NAMES), max_size=2)
    fuzz(check_pipeline, examples, step_plans, costs, disabled, st.booleans(), st.sampled_from(Merge))


@MANY
def test_ranks_with_different_batch_sizes_issue_equal_collectives(examples: int) -> None:
    rows = st.sampled_from([1, 80, 5000])
    fuzz(check_order, examples, step_plans, costs, st.booleans(), st.sampled_from(Merge), rows)


def steps(*actions: str) -> tuple[Action, ...]:
    return tuple((action, 0, 0) for action in actions)


# Steps that once gave wrong results or an illegal graph.
@pytest.mark.parametrize(
    "actions",
    [
        # A shard written between two gathers that were merged.
        steps("gather", "fill_all", "write_shard", "gather", "fill_all", "read"),
        # A row of a shard written between two gathers that were joined.
        steps("gather", "write_row_of_shard", "gather", "read_value", "read_old_value"),
        # The first gather's value written, and read instead of the second's.
        steps("gather_item", "gather", "write_value", "gather", "read_value", "read_old_value"),
        # A gradient written between two reductions that were merged.
        steps("reduce_anew", "write_gradient", "reduce"),
        # The first reduction's result written between the two.
        steps("reduce_anew", "write_reduced", "reduce_anew"),
        steps("reduce_anew", "reduce_anew", "accumulate", "reduce_anew"),
        # Merged packs, packed once more by a second run.
        steps("gather", "gather"),
    ],
)
@pytest.mark.parametrize("numels", [(1,), (1, 1, 1), (1, 2)])
@pytest.mark.parametrize("merge", Merge)
@pytest.mark.parametrize("costs", [costs_of(0, 1), costs_of(40, 16), costs_of(40, 10**9)])
def test_step_that_once_failed_keeps_its_results(
    actions: tuple[Action, ...], numels: tuple[int, ...], merge: Merge, costs: Costs
) -> None:
    plan = StepPlan((GroupPlan(numels, torch.float32, "dp"),), actions)
    check_each_pass(plan, costs, hoist=True, merge=merge)
    check_pipeline(plan, costs, frozenset(), hoist=True, merge=merge)


def test_packs_are_joined_past_a_pack_of_a_different_dtype() -> None:
    wide, low = GroupPlan((1, 1), torch.float32, "dp"), GroupPlan((1,), torch.bfloat16, "dp")
    plan = StepPlan((wide, low), (("reduce_anew", 1, 0), ("reduce_anew", 0, 0), ("reduce_anew", 1, 0)))
    check_each_pass(plan, costs_of(8, 1), hoist=False, merge=Merge.ALL)
