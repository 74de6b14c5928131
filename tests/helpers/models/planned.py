"""The model for the tests of `compile-fsdp plan`: known bytes of parameters and activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ROWS, WIDTH, HIDDEN = 512, 64, 256
BLOCK_BYTES = 2 * WIDTH * HIDDEN * 4  # parameters of a block in float32
HEAD_BYTES = WIDTH * 8 * 4


class Block(nn.Module):
    """Residual block whose backward needs its input (ROWS, WIDTH) and its hidden values (ROWS, HIDDEN)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        loss: torch.Tensor = self.head(x).square().mean()
        return loss


def build(layers: int = 3) -> tuple[nn.Module, dict[str, Any]]:
    return Model(layers), {"x": torch.zeros(ROWS, WIDTH)}
