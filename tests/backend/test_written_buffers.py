"""Gradients are those of eager FSDP2 if the forward writes a buffer after it has read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helpers.models.blockwise import shard_blocks
from helpers.parity.check import Parity, compare_grads
from helpers.parity.twins import build_both
from helpers.ranks.tests import on_ranks


class _Block(nn.Module):
    """Computes the distance from a center, which moves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("center", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        difference = self.inner(x) - self.center  # the gradient of neither op reads the center
        x = x + self.outer(torch.sin(difference))
        with torch.no_grad():
            self.center.add_(1.0)
        return x


class _Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("layers", [1, 3], ids=["ops", "calls of a block"])
@on_ranks(2)
def test_backward_reads_no_buffer_that_the_forward_has_written(rank: int, layers: int) -> None:
    def build(fully_shard: Any) -> Any:
        return shard_blocks(_Model(layers), fully_shard)

    eager, ours = build_both(build)
    result = Parity()
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(512, 8)
        for model in (ours, eager):
            model(x).backward()
        compare_grads(result, f"step {step}", ours, eager)
    assert result.differing == []
