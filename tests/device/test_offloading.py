"""Offloading under a memory budget on the emulated device."""

from __future__ import annotations

import pytest
import torch

from compile_fsdp.passes import Costs
from compile_fsdp.reports import reports, reset_reports
from compile_fsdp.tools.bench.measure import peak_bytes
from helpers.device.install import delayed
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.models.layers import Wide
from helpers.parity.check import full
from helpers.ranks.pools import run_ranks

DEVICE = "emulated"
ROWS, DIM = 512, 32
# With these costs a matrix product takes 3 ms, and offloading a result 50 us.
COSTS = Costs(latency=1e-6, comm_bandwidth=1e9, memory_bandwidth=6e9, flops=1e9, offload_bandwidth=4e9)
PLENTY = 10**9


def _train(
    rank: int, blocks: int, budget: int, inner_backend: str = "inductor"
) -> tuple[int, int, int, list[torch.Tensor]]:
    """Offloaded results, removed windows, peak bytes, and gradients of a step with delayed streams."""
    torch.manual_seed(0)
    model, batch = shard_blocks(Wide(blocks, DIM)), torch.randn(ROWS, DIM)
    reset_reports()
    compile_whole(model, inner_backend=inner_backend, memory_budget=budget, costs=COSTS, progress=False)

    def step() -> None:
        model.zero_grad()
        model(batch).backward()

    step()
    model.zero_grad()
    peak = peak_bytes(step, batch.device)
    with delayed(rank, 1_000.0):
        step()
        gradients = [full(parameter.grad).cpu() for parameter in model.parameters() if parameter.grad is not None]
    (decision,) = (report.decision for report in reports() if report.decision is not None)
    return len(decision.offloaded), sum(report.windows_removed for report in reports()), peak, gradients


@pytest.mark.parametrize(
    ("blocks", "budget"),
    [
        (2, 850_000),
        pytest.param(4, 900_000, marks=pytest.mark.slow),
        pytest.param(4, 1_050_000, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_equal_and_the_peak_is_within_the_budget(blocks: int, budget: int) -> None:
    plenty = run_ranks(2, _train, blocks, PLENTY, "aot_eager", device=DEVICE)
    little = run_ranks(2, _train, blocks, budget, device=DEVICE)
    for (kept, _, most, expected), (offloaded, windows, peak, gradients) in zip(plenty, little, strict=True):
        assert kept == 0
        assert offloaded > 0 and windows > 0
        assert peak <= budget < most
        torch.testing.assert_close(gradients, expected, rtol=1e-6, atol=1e-8)
