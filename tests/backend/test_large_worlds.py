"""Graphs of large worlds, traced in one process on the fake process group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compile_fsdp
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from helpers.graphs.capture import events, render_step, without_graph_caches
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.models.layers import Wide
from helpers.ranks.fake_world import fake_world


def _graphs(world_size: int, rank: int) -> list[str]:
    """Render one rank's graphs; shards are padded, and empty on the last ranks of a large world."""
    with fake_world(world_size, rank):
        torch.manual_seed(0)
        model = shard_blocks(nn.Sequential(nn.Linear(4, 12, bias=False), nn.Tanh(), nn.Linear(12, 2, bias=False)))
        return render_step(model, lambda: model(torch.ones(3, 4)).sum())


def test_first_and_last_rank_of_a_large_world_have_equal_graphs() -> None:
    first, last = _graphs(1024, 0), _graphs(1024, 1023)
    assert first == last
    assert events(first[1]) == ["gather[4096]", "gather[12288]", "mm[3, 12]", "mm[3, 2]"]
    assert "reduce[4]" in events(first[3]) and "reduce[12]" in events(first[3])


def test_all_windows_are_removed_if_each_shard_is_one_row() -> None:
    compile_fsdp.reset_reports()
    with fake_world(64):
        torch.manual_seed(0)
        model = shard_blocks(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64)))
        step = torch.compile(model, backend="compile_fsdp", fullgraph=True)
        with without_graph_caches():
            step(torch.ones(3, 32)).sum().backward()
    forward, backward = compile_fsdp.reports()
    assert (forward.windows_removed, forward.kept) == (4, ())
    assert (backward.windows_removed, backward.kept) == (4, ())


FEATURES, ROWS = 100, 64
# Between a step's smallest and fastest plan. Larger worlds need larger budgets, because padding enlarges the gathers.
BUDGETS = {8: 2_200_000, 64: 2_400_000, 512: 5_500_000, 4096: 25_000_000}


def _decided(world_size: int, rank: int, budget: int) -> BudgetDecision:
    """One rank's budget decision, made alone because ranks of a fake process group cannot communicate."""
    compile_fsdp.reset_reports()
    with fake_world(world_size, rank):
        torch.manual_seed(0)
        model = shard_blocks(Wide(3, FEATURES))  # shards are padded, and empty on the last ranks of large worlds
        compile_whole(model, inner_backend="aot_eager", memory_budget=budget, progress=False)
        model(torch.ones(ROWS, FEATURES)).backward()
        (decision,) = (report.decision for report in compile_fsdp.reports() if report.decision is not None)
    return decision


@pytest.mark.parametrize(
    "world_size", [8, *(pytest.param(size, marks=pytest.mark.slow) for size in (64, 512, 4096))]
)
def test_first_and_last_rank_of_a_large_world_make_equal_budget_decisions(world_size: int) -> None:
    budget = BUDGETS[world_size]
    first, last = (_decided(world_size, rank, budget) for rank in (0, world_size - 1))
    assert first == last
    assert first.choices
    assert first.peak_bytes <= budget < first.fastest_bytes
