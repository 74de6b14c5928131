"""What `plan` says of a memory budget is what a compile on so many ranks decides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from compile_fsdp.passes import Costs
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from compile_fsdp.reports import reports, reset_reports
from compile_fsdp.tools.planning.budgets import CompiledStep
from compile_fsdp.wrap import auto_shard, plan
from helpers.ranks.fake_world import fake_world

COSTS = Costs(latency=1e-3, comm_bandwidth=1e9, memory_bandwidth=1e10, flops=1e10)
ROWS, DIM = 256, 24  # 24 rows are uneven on 16 ranks
PLENTY, TIGHT = 10**9, 400_000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM + 2), nn.Linear(2 * DIM + 2, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


def compiled(ranks: int, rank: int, budget: int) -> BudgetDecision:
    """What one rank of a world decides when it compiles."""
    with fake_world(ranks, rank):
        model = auto_shard(Model())
        options = {"memory_budget": budget, "costs": COSTS, "inner_backend": "aot_eager"}
        model.compile(backend="compile_fsdp", fullgraph=True, options=options)
        reset_reports()
        model(torch.zeros(ROWS, DIM))
        (report,) = reports()
    assert report.decision is not None
    return report.decision


@pytest.fixture(scope="module")
def step() -> CompiledStep:
    with torch.device("meta"):
        model = Model()
    return CompiledStep(plan(model), {"x": torch.empty(ROWS, DIM, device="meta")}, ranks=64, fuses=False)


@pytest.mark.parametrize("budget", [PLENTY, TIGHT])
@pytest.mark.parametrize("ranks", [2, 16, 64])
def test_a_plan_decides_as_a_compile_does(step: CompiledStep, ranks: int, budget: int) -> None:
    planned = step.decide(ranks, budget, COSTS)
    assert planned.fits
    assert bool(planned.choices) is (budget == TIGHT)
    assert planned == compiled(ranks, 0, budget)


# On many ranks, each with a row of a matrix of 50, most of what is gathered is padding.
@pytest.mark.parametrize(("ranks", "budget"), [(8, TIGHT), (64, TIGHT), (512, 1_100_000), (4096, 7_000_000)])
def test_the_last_rank_decides_as_the_first(ranks: int, budget: int) -> None:
    first, last = (compiled(ranks, rank, budget) for rank in (0, ranks - 1))
    assert first == last
    assert first.choices


def test_what_does_not_fit_is_told_with_what_does(step: CompiledStep) -> None:
    least = step.decide(16, 0, COSTS)
    assert not least.fits
    assert step.decide(16, least.peak_bytes, COSTS).fits
    assert not step.decide(16, int(0.99 * least.peak_bytes), COSTS).fits


def test_over_a_fast_link_more_is_gathered_again_and_less_computed(step: CompiledStep) -> None:
    usual = step.decide(16, TIGHT, COSTS)
    fast = step.decide(16, TIGHT, replace(COSTS, latency=1e-9, comm_bandwidth=1e15))
    assert set(fast.kept) < set(usual.kept)
    assert len(fast.recomputed) <= len(usual.recomputed)


def test_no_process_group_is_left(step: CompiledStep) -> None:
    assert not torch.distributed.is_initialized()
