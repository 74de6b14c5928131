"""Fit a step into a memory budget with the least time.

Precondition  a forward graph, as Dynamo has traced it, that a backward may follow
Match         groups whose parameters are each filled once and freed once; ops whose results autograd saves
Rewrite       the resize(0) of kept groups' parameters go; ops that the backward runs again, and ops whose results are
              offloaded, are marked
Report        the decision, and the estimated peak

    before                                    after
    resize_storage_bytes_(weight, 16)         resize_storage_bytes_(weight, 16)
    copy_(weight, gathered)                   copy_(weight, gathered)
    y = linear(x, weight)                     y = linear(x, weight)
    z = gelu(y)                               z = gelu(y)                        # computed again in the backward
    resize_storage_bytes_(weight, 0)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from compile_fsdp.passes.analysis.costs import Costs
from compile_fsdp.passes.analysis.equal_blocks import BlockCall, find_equal_blocks
from compile_fsdp.passes.budget.choose import Choice, fit, ops_run_again
from compile_fsdp.passes.budget.read_step import read_step
from compile_fsdp.passes.budget.step_memory import Sharding
from compile_fsdp.passes.budget.timeline import Timeline
from compile_fsdp.passes.text import count, format_bytes
from compile_fsdp.torch_compat.dynamo import request_offload, request_recomputation

# Largest share of a step's time that calls of equal blocks may cost. The calls shorten the first step.
_LOST = 0.01

# Small steps exceeded the estimate by up to 10 %: benchmarks/results/memory_budget_cpu_202611.md.
MARGIN = 1.06


@dataclass(frozen=True, slots=True)
class BudgetDecision:
    """How a step is fitted into its budget. Bytes and seconds are estimates; positions are those in `Step.ops`."""

    kept: tuple[int, ...]  # numbers of the groups that stay unsharded from the forward to the backward
    recomputed: tuple[int, ...]  # positions of the ops that the backward runs again
    has_large_packs: bool  # packs of several groups are gathered, and reduced, together
    ops: int  # number of ops
    fastest_bytes: int  # most bytes at a time if everything is kept and saved
    peak_bytes: int  # most bytes at a time as decided; the fewest possible if the step does not fit
    seconds: float  # that the decision adds to the fastest step
    fits: bool  # the step fits into the budget
    choices: tuple[Choice, ...] = ()  # that were made, cheapest first
    budget: int = 0  # most bytes that a step may allocate, by the user or the device
    offloaded: tuple[int, ...] = ()  # positions of the ops whose results wait for the backward in host memory
    calls_blocks: bool = False  # equal blocks become calls
    lowered: int = 0  # bytes that stay free because a step has exceeded the budget; `budget` is so much lower

    def __str__(self) -> str:
        packs = ", in large packs" if self.has_large_packs else ""
        away = f", {len(self.offloaded)} offloaded" if self.offloaded else ""
        lower = f"; {format_bytes(self.lowered)} kept free, because a step exceeded the budget" if self.lowered else ""
        return (
            f"memory budget: {count(len(self.kept), 'group')} kept{packs}, "
            f"{len(self.recomputed)} of {self.ops} ops computed again{away}; about {format_bytes(self.peak_bytes)}, "
            f"where the fastest step takes {format_bytes(self.fastest_bytes)} and {self.seconds * 1e3:.1f} ms less"
            f"{lower}"
        )


def fit_memory_budget(
    graph: fx.Graph,
    parameters: Mapping[fx.Node, Sharding],
    ranks: int,
    budget: int,
    costs: Costs,
    settle: Callable[[Sequence[BudgetDecision]], BudgetDecision],
    *,
    fuses: bool = True,
    calls_blocks: bool = False,
) -> BudgetDecision:
    """Decide, and rewrite the graph as decided.

    Args:
        parameters: Shardings of the unsharded parameters among the graph's placeholders.
        ranks: Number of ranks that share the parameters.
        budget: Most bytes that a step may allocate above the sharded state.
        settle: Returns the decision of all ranks for this rank's decisions, the best of them first. Raises if the step
            does not fit.
        fuses: Whether pointwise ops are compiled together with their readers.
        calls_blocks: Whether equal blocks may become calls.
    """
    step = read_step(graph, parameters, fuses=fuses)
    timeline = Timeline(step, ranks, costs)
    decisions = [decide(timeline, budget)]
    if calls_blocks and (blocks := _block_of_each_op(step.ops, find_equal_blocks(graph))):
        # Blocks offload nothing, because offloads wait for one another.
        with_blocks = decide(
            Timeline(replace(step, blocks=blocks), ranks, replace(costs, offload_bandwidth=0.0)), budget
        )
        lost = with_blocks.seconds - decisions[0].seconds
        is_better = with_blocks.fits and lost <= _LOST * timeline.step_seconds
        decisions.insert(0 if is_better else 1, replace(with_blocks, calls_blocks=True))
    decision = settle(decisions)
    kept = set(decision.kept)
    for group in step.groups:
        if group.number in kept:
            for node in group.frees:
                graph.erase_node(node)
    # The partitioner would save the results of ops that a marked one needs, if they were not marked, too.
    for position in {op for at in decision.recomputed for op in ops_run_again(step, at)}:
        for node in _with_items(step.ops[position]):
            request_recomputation(node)
    for position in decision.offloaded:
        for node in _with_items(step.ops[position]):
            request_offload(node, timeline.least_offloaded_bytes)
    return decision


def _block_of_each_op(ops: Sequence[fx.Node], blocks: Sequence[Sequence[BlockCall]]) -> dict[int, range]:
    """Map the position of each op in a block to the positions of all the block's ops."""
    numbers = {node: i for i, node in enumerate(ops)}
    found = [[numbers[node] for node in block.ops if node in numbers] for equals in blocks for block in equals]
    return {op: range(each[0], each[-1] + 1) for each in found for op in each}


def _with_items(node: fx.Node) -> list[fx.Node]:
    return [node, *(user for user in node.users if user.target is operator.getitem)]


def decide(timeline: Timeline, budget: int) -> BudgetDecision:
    """Return this rank's decision for a budget, margin included."""
    fitted = fit(timeline, math.ceil(budget / MARGIN))
    choices = fitted.choices
    return BudgetDecision(
        kept=tuple(sorted(choices.kept)),
        recomputed=tuple(sorted(choices.recomputed)),
        has_large_packs=choices.has_large_packs,
        ops=len(timeline.step.ops),
        fastest_bytes=int(fitted.fastest * MARGIN),
        peak_bytes=int(fitted.peak * MARGIN),
        seconds=sum(choice.seconds for choice in fitted.made),
        fits=fitted.fits,
        choices=fitted.made,
        budget=budget,
        offloaded=tuple(sorted(choices.offloaded)),
    )
