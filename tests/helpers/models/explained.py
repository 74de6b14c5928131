"""The model for the tests of `explain`."""

from __future__ import annotations

import torch
from torch import nn

WORLD = 1024
HOSTILE = "</script><script>document['title']='owned'</script>"


class Block(nn.Module):
    """Block whose shards are even, two rows each, and contiguous in a packed buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * WORLD, bias=False)
        self.gate = nn.Linear(width, 2 * WORLD, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x)) * self.gate(x)
        return x + hidden.view(len(x), -1, x.shape[1]).mean(1)


class Model(nn.Module):
    """Two blocks, and a root with a module whose name is markup."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.add_module(HOSTILE, nn.Linear(width, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return getattr(self, HOSTILE)(x)
