"""Layers and small models, each with a feature that sharding must support."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from helpers.models.stacks import Block, mean_square


class Scale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Product(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(inputs, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Scaled(nn.Module):
    """Two scales; the partitioner recomputes the first scale for the second scale's gradient."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.first, self.second = Scale(dim), Scale(dim)
        self.out = nn.Linear(dim, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = checkpoint(self.second, self.first(x), use_reentrant=False)
        return mean_square(self.out(x), y)


class WithSpare(Block):
    """A block with a parameter that no forward uses."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.spare = nn.Parameter(torch.ones(dim))


class OddSizes(nn.Module):
    """Parameters that are empty, smaller than the world, or not divisible by its size."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 5)
        self.single = nn.Parameter(torch.ones(1))
        self.rows = nn.Parameter(torch.full((3, 5), 0.5))
        # Frozen: torch cannot reduce an empty gradient.
        self.empty = nn.Parameter(torch.empty(0, 5), requires_grad=False)
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = torch.tanh(self.inp(x)) * self.single
        h = h + (h @ self.rows.T) @ self.rows + self.empty.sum()
        return mean_square(self.out(h), y)


class Normed(nn.Module):
    """Batch norm, with its running buffers, before two blocks.

    After a block, it would make the gradient of the block's last bias zero up to rounding, which cannot be compared.
    """

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.first, self.second = Block(dim), Block(dim)
        self.norm = nn.BatchNorm1d(dim)
        self.out = nn.Linear(dim, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return mean_square(self.out(self.second(self.first(self.norm(x)))), y)


class Convolutions(nn.Module):
    """Convolutions in blocks and root, for whose weights Inductor wants channels last."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.inp = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.out = nn.Linear(channels, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.tanh(self.inp(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return mean_square(self.out(x.mean((2, 3))), y)


class Adapted(nn.Module):
    """A frozen linear layer with a trainable low-rank adapter (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Experts(nn.Module):
    """A soft mixture of experts; the parameter `experts` goes on a separate mesh."""

    def __init__(self, dim: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(dim, count)
        self.experts = nn.Parameter(torch.randn(count, dim, dim) / dim**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        return x + torch.einsum("bd,edf,be->bf", x, self.experts, weights)


class TiedEnds(nn.Module):
    """A block and a norm between an embedding and a tied output projection."""

    def __init__(self, vocabulary: int = 16, dim: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.block = Block(dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, hidden_only: bool = False) -> torch.Tensor:
        h = self.norm(self.block(self.embedding(tokens)))
        if hidden_only:
            return h.cos().mean()
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), tokens.flatten())


class Embedded(nn.Module):
    """An embedding whose backward does not read its weight."""

    def __init__(self, vocabulary: int = 16, dim: int = 8) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(vocabulary, dim), Block(dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.head(self.block(self.embedding(tokens)))
        return nn.functional.cross_entropy(h.flatten(0, 1), tokens.flatten())


def _keep_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(nn.Module):
    """Blocks under selective activation checkpointing that saves the results of matrix products."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(dim), Block(dim)])
        self.out = nn.Linear(dim, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            contexts = partial(create_selective_checkpoint_contexts, _keep_matmuls)
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return mean_square(self.out(x), y)


LATE_MS = 50


@torch.library.custom_op("tests::arrive_late", mutates_args=())
def arrive_late(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of `x`, with a delay on odd ranks."""
    if dist.get_rank() % 2 == 1:
        time.sleep(LATE_MS / 1000)
    return x.clone()


arrive_late.register_fake(torch.empty_like)


class _LateGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return arrive_late(grad)


arrive_late.register_autograd(lambda ctx, grad: grad)


class Late(nn.Module):
    """A block whose output, or whose input's gradient, is late on odd ranks."""

    def __init__(self, block: nn.Module, in_backward: bool) -> None:
        super().__init__()
        self.block, self.in_backward = block, in_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_backward:
            return self.block(_LateGradient.apply(x))
        return arrive_late(self.block(x))


class Wrapper(nn.Module):
    """A wrapper of the sharded root that does nothing, like a data-parallel wrapper."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.module(**batch)


class BatchedProduct(nn.Module):
    """A weight read through views of views, which a partitioner may save."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, dim * dim).view(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x[None], self.weight[None].transpose(-2, -1))[0]


class Wide(nn.Module):
    """Residual blocks whose activations take more memory than their parameters."""

    def __init__(self, blocks: int, dim: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))
            for _ in range(blocks)
        )
        self.out = nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x).square().mean()
