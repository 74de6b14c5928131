"""A small model with uneven shards, on a 2 x 2 HSDP mesh."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import compile_fsdp


class Block(nn.Module):
    """Two linear layers and a residual: enough ops for a block that is compiled once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.outer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `x`, (batch, 4), to (batch, 4)."""
        return x + 0.5 * self.outer(torch.relu(self.inner(x)))


def build_hybrid(block: type[nn.Module] = Block) -> nn.Sequential:
    """Build the model on one of four ranks, sharded and not compiled."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(block(), block(), nn.Linear(4, 1))
    for module in (*model[:2], model):
        compile_fsdp.fully_shard(module, mesh=mesh)
    return model
