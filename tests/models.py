"""Reference models of the parity tests: each returns the model, its blocks to shard, and its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Case:
    """A model to train.

    Attributes:
        model: Its forward returns a scalar loss, or an output with a `loss`.
        blocks: Modules to shard before the root, in order.
        batch: Draws the keyword arguments of one forward.
    """

    model: nn.Module
    blocks: list[nn.Module]
    batch: Callable[[], dict[str, Any]]


class Block(nn.Module):
    """Pre-norm MLP block with a scale; optionally checkpointed inside, or with a graph break in its middle."""

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
    """Blocks between an input and an output projection; `uses` runs every block several times in a row."""

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
        return _loss(self.out(x), y)


class Pair(nn.Module):
    """Two blocks and a parameter of its own: a sharded module that contains sharded modules."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.second = Block(dim), Block(dim)
        self.gate = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.gate)


class Nested(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.pairs = nn.Sequential(Pair(dim), Pair(dim))
        self.out = nn.Linear(dim, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return _loss(self.out(self.pairs(x)), y)


def _loss(output: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    # Random targets keep loss and gradients away from zero, where their relative differences mean nothing.
    return output.square().mean() if target is None else (output - target).square().mean()


def _rows(dim: int = 8) -> Callable[[], dict[str, Any]]:
    return lambda: {"x": torch.randn(4, dim), "y": torch.randn(4, 3)}


def stack(**kwargs: Any) -> Case:
    model = Stack(**kwargs)
    return Case(model, list(model.layers), _rows(kwargs.get("dim", 8)))


def nested() -> Case:
    model = Nested()
    blocks = [block for pair in model.pairs for block in (pair.first, pair.second, pair)]
    return Case(model, blocks, _rows())


def frozen() -> Case:
    case = stack()
    case.blocks[0].requires_grad_(False)
    case.blocks[1].up.weight.requires_grad_(False)  # type: ignore[union-attr]
    return case


class WithSpare(Block):
    """Has a parameter that no forward uses."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.spare = nn.Parameter(torch.ones(dim))


def unused_parameter() -> Case:
    case = stack()
    case.model.layers[0] = WithSpare(8)
    return Case(case.model, list(case.model.layers), case.batch)


def uneven() -> Case:
    return stack(dim=7)  # no size of any parameter is divisible by 2 or 4


def _tokens() -> dict[str, Any]:
    tokens = torch.randint(0, 64, (2, 16))
    return {"input_ids": tokens, "labels": tokens}


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    return Case(model, list(model.model.layers), _tokens)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    # Unset, the first forward logs a warning about it, which is a graph break.
    model.loss_type = "ForCausalLM"
    return Case(model, list(model.transformer.h), _tokens)


def transformer(tied: bool) -> Case:
    from compile_fsdp.train.config import ModelConfig
    from compile_fsdp.train.model import Transformer

    config = ModelConfig(dim=32, layers=2, heads=4, hidden=64, tie_embeddings=tied)
    model = Transformer(config, seq_len=16)
    return Case(model, list(model.layers), _bytes)


def _bytes() -> dict[str, Any]:
    text = torch.randint(0, 256, (2, 17))
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


CASES: dict[str, Callable[[], Case]] = {
    "mlp": stack,
    "nested": nested,
    "used_twice": lambda: stack(uses=2),
    "used_three_times": lambda: stack(uses=3),
    "transformer": lambda: transformer(tied=False),
    "transformer_tied": lambda: transformer(tied=True),
    "llama": llama,
    "gpt2": gpt2,
    "checkpoint_inside": lambda: stack(checkpointed=True),
    "checkpoint_outside": lambda: stack(checkpoint_outside=True),
    "frozen": frozen,
    "uneven": uneven,
    "unused_parameter": unused_parameter,
    "graph_break": lambda: stack(breaks=True),
}
