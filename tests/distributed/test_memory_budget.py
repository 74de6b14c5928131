"""With memory to spare, the backward gathers less, and trains the same."""

from __future__ import annotations

import pytest
import torch

from helpers.parity.check import Parity, loss_of
from helpers.parity.twins import Twins
from helpers.ranks.pools import run_ranks
from helpers.ranks.recording import gathers_of

PLENTY = 10**9


def _gathers(twins: Twins) -> int:
    """All-gathers of one compiled step; gradients are dropped."""

    def step() -> None:
        loss_of(twins.ours.model, twins.batch()).backward()

    count = gathers_of(step)
    for parameter in twins.ours.model.parameters():
        parameter.grad = None
    return count


def _train(rank: int, budget: int, inner_backend: str) -> tuple[Parity, int]:
    options = {"inner_backend": inner_backend, "memory_budget": budget}
    twins = Twins(rank, options=options)
    twins.train()
    twins.train()
    gathers = _gathers(twins)
    twins.evaluate(torch.no_grad)  # gathers, and frees, what a forward has kept
    loss_of(twins.ours.model, twins.batch())  # without a backward
    twins.train()
    with torch.compiler.set_stance("force_eager"):
        twins.train()
    twins.train()
    return twins.result, gathers


# Two blocks and the root, with Inductor joined by `pack_gathers`; without the budget the blocks are gathered again.
# What is joined is in test_collectives.py, too.
@pytest.mark.parametrize(
    ("inner_backend", "budget", "expected_gathers"),
    [
        ("aot_eager", PLENTY, 3),
        pytest.param("aot_eager", 0, 5, marks=pytest.mark.slow),
        pytest.param("inductor", PLENTY, 1, marks=pytest.mark.slow),
        pytest.param("inductor", 0, 5, marks=pytest.mark.slow),
    ],
)
def test_what_fits_is_gathered_once(inner_backend: str, budget: int, expected_gathers: int) -> None:
    for result, gathers in run_ranks(2, _train, budget, inner_backend):
        assert result.differing == [] if inner_backend == "aot_eager" else result.worst < 2e-6
        assert gathers == expected_gathers
