"""Advice in reports: changes that save time, with the estimated gain."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import compile_fsdp
from compile_fsdp.advice import GroupFigures, advise
from compile_fsdp.passes import Costs
from compile_fsdp.passes.budget.choose import Choice
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from helpers.models.blockwise import compile_whole
from helpers.models.layers import Embedded, TiedEnds
from helpers.parity.check import build, loss_of
from helpers.ranks.fake_world import fake_world

MIB = 2**20

# An all-gather of an 8 MiB block over 8 ranks: 0.5 ms latency, and 7 ms for 7 MiB at 1 MiB/ms.
COSTS = Costs(latency=5e-4, comm_bandwidth=MIB / 1e-3, memory_bandwidth=1e12, flops=1e12, rows=2048)
BLOCK = GroupFigures("block", (8 * MIB,), (8 * MIB,), 2 * MIB, ranks=8, backward_ranks=8)
BLOCKS = (BLOCK,) * 4
TINY = GroupFigures("tiny", (8 * 2**10,), (8 * 2**10,), 2 * 2**10, ranks=8, backward_ranks=1)
# A budget that has no memory for packs of several groups.
SMALL_PACKS = BudgetDecision((), (), False, 10, MIB, MIB, 0.0, True, (), MIB)


def test_advises_a_budget_that_keeps_groups_for_the_backward() -> None:
    (advice,) = advise(BLOCKS, COSTS, None)
    # Four all-gathers of 7.5 ms, and 3/4 of the latency of the remaining four all-gathers and four reductions.
    assert advice.most_seconds == pytest.approx(4 * 7.5e-3 + 3 / 4 * 8 * 0.5e-3)
    # A block needs 2 * 2048 * 2 Mi operations, twice as many in the backward, two all-gathers and a reduction.
    compute = 4 * 2 * 2048 * 2 * MIB / 1e12
    assert advice.step_seconds == pytest.approx(3 * compute + 3 * 4 * 7.5e-3)
    # The forward's 34 ms of compute hide 30 ms of collectives; the backward's 69 ms hide 60 ms.
    assert advice.least_seconds == 0
    assert str(advice).startswith('estimated: a memory_budget ("auto", or bytes: about 32 MiB more than now)')
    assert "keeps 4 groups unsharded for the backward" in str(advice)
    assert "would take up to 33 ms off a forward and its backward," in str(advice)
    assert str(advice).endswith("matrix products and collectives take about 193 ms")


def test_least_gain_equals_most_gain_if_communication_dominates() -> None:
    (advice,) = advise(BLOCKS, dataclasses.replace(COSTS, flops=1e15), None)
    compute = 4 * 2 * 2048 * 2 * MIB / 1e15
    assert advice.least_seconds == pytest.approx(advice.most_seconds)
    assert advice.step_seconds == pytest.approx(3 * compute + 3 * 4 * 7.5e-3)
    assert "would take 33 ms off a forward and its backward" in str(advice)


@pytest.mark.parametrize(
    ("change", "costs"),
    [
        ({"backward_ranks": 1}, {}),  # the backward gathers nothing, and latency is small
        ({"ranks": 1, "backward_ranks": 1}, {}),
        ({}, {"flops": 1e10}),  # compute dominates
    ],
)
def test_advice_with_negligible_gain_is_omitted(change: dict[str, Any], costs: dict[str, Any]) -> None:
    groups = [dataclasses.replace(BLOCK, **change)] * 4
    assert advise(groups, dataclasses.replace(COSTS, **costs), None) == ()


def test_advises_merging_small_groups() -> None:
    large = dataclasses.replace(BLOCK, backward_ranks=1)
    groups, costs = [large, *[TINY] * 40], dataclasses.replace(COSTS, flops=1e15)
    (larger,) = advise(groups, costs, SMALL_PACKS)
    assert "1 group in the place of 40 small ones" in larger.change
    # One all-gather and one reduction replace 40 of each.
    assert larger.most_seconds == pytest.approx(2 * 39 * 0.5e-3)
    # Without a budget, small groups share collectives.
    (keep,) = advise(groups, costs, None)
    assert "memory_budget" in keep.change
    assert keep.most_seconds == pytest.approx(3 / 4 * 2 * 41 * 0.5e-3)
    # Not all parameters into one group.
    assert not any("in the place of" in each.change for each in advise([TINY] * 40, COSTS, SMALL_PACKS))


def test_advises_a_larger_memory_budget() -> None:
    choices = (Choice(7.5e-3, 8 * MIB, group=0), Choice(4e-3, MIB, op=3), Choice(3e-3, 4 * MIB))
    decision = BudgetDecision((1, 2, 3), (3,), False, 10, 100 * MIB, 70 * MIB, 14.5e-3, True, choices, 72 * MIB)
    kept = dataclasses.replace(BLOCK, backward_ranks=1)
    (advice,) = advise([BLOCK, kept, kept, kept], COSTS, decision)
    assert "a memory_budget of 100 MiB in the place of 72 MiB" in advice.change
    # The all-gather, the op, and 3/4 of the latency of four all-gathers and four reductions.
    assert advice.most_seconds == pytest.approx(7.5e-3 + 4e-3 + 3 / 4 * 8 * 0.5e-3)
    nothing = dataclasses.replace(decision, choices=(), has_large_packs=True)
    assert advise([kept] * 4, COSTS, nothing) == ()


def _reports(**options: Any) -> list[compile_fsdp.GraphReport]:
    compile_fsdp.reset_reports()
    with fake_world(4):
        case = build("mlp", compile_fsdp.fully_shard)
        compile_whole(case.model, inner_backend="eager", costs=COSTS, **options)
        loss_of(case.model, case.batch()).backward()
    found = list(compile_fsdp.reports())
    compile_fsdp.reset_reports()
    return found


@pytest.mark.parametrize(("model", "ranks"), [(Embedded, 1), (TiedEnds, 4)])
def test_backward_gathers_no_group_that_only_an_embedding_reads(model: type[nn.Module], ranks: int) -> None:
    compile_fsdp.reset_reports()
    with fake_world(4):
        sharded = model()
        ends = sharded.embedding if ranks == 1 else [sharded.embedding, sharded.head]
        for module in (ends, sharded.block, sharded):
            compile_fsdp.fully_shard(module)
        compile_whole(sharded, inner_backend="eager", costs=COSTS)(torch.randint(16, (2, 4)))
    (forward,) = compile_fsdp.reports()
    (again,) = (group.backward_ranks for group in forward.groups if "embedding" in group.name)
    assert again == ranks
    compile_fsdp.reset_reports()


def test_forward_report_lists_groups_and_advice() -> None:
    forward, backward = _reports()
    assert backward.groups == () == backward.advice
    ranks = {group.name: (group.ranks, group.backward_ranks) for group in forward.groups}
    # The root's group stays unsharded until the backward, as in torch.
    assert sorted(ranks.values()) == [(4, 1), (4, 4), (4, 4)]
    assert all(group.size > 0 and group.reduced == group.unsharded for group in forward.groups)
    advice = forward.advice[0]
    assert "keeps 2 groups unsharded" in advice.change and str(advice) in str(forward)

    (fitted, _) = _reports(memory_budget=2**30)
    assert {group.backward_ranks for group in fitted.groups} == {1}
    assert all("memory_budget" not in each.change for each in fitted.advice)
