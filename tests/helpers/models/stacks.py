"""Stacks of residual blocks, the base of the reference models."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Pre-norm MLP block with a scale and an optional checkpoint or graph break."""

    def __init__(self, dim: int, checkpointed: bool = False, breaks: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)
        self.scale = nn.Parameter(torch.ones(dim))
        self.checkpointed, self.breaks = checkpointed, breaks

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(self.norm(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.scale * self.down(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)


class Stack(nn.Module):
    """Blocks between two projections; each block runs `uses` times in a row."""

    def __init__(
        self, dim: int = 8, layers: int = 2, uses: int = 1, checkpoint_outside: bool = False, **block: bool
    ) -> None:
        super().__init__()
        self.inp = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(Block(dim, **block) for _ in range(layers))
        self.out = nn.Linear(dim, 3)
        self.uses, self.checkpoint_outside = uses, checkpoint_outside

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            for _ in range(self.uses):
                x = checkpoint(layer, x, use_reentrant=False) if self.checkpoint_outside else layer(x)
        return mean_square(self.out(x), y)


class Pair(nn.Module):
    """Two blocks and a parameter: a sharded module that contains sharded modules."""

    def __init__(self, dim: int, **block: bool) -> None:
        super().__init__()
        self.first, self.second = Block(dim, **block), Block(dim, **block)
        self.gate = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.gate)


class Nested(nn.Module):
    def __init__(self, dim: int = 8, **block: bool) -> None:
        super().__init__()
        self.pairs = nn.Sequential(Pair(dim, **block), Pair(dim, **block))
        self.out = nn.Linear(dim, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return mean_square(self.out(self.pairs(x)), y)


def mean_square(output: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    # Random targets keep loss and gradients away from zero, where relative differences are meaningless.
    return output.square().mean() if target is None else (output - target).square().mean()
