"""Reference models of the parity tests, with blocks and batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


@dataclass
class Case:
    """A model to train.

    Attributes:
        model: Model whose forward returns a scalar loss, or an output with a `loss`.
        blocks: Modules to shard before the root, in order.
        batch: Draws the keyword arguments of one forward.
    """

    model: nn.Module
    blocks: list[nn.Module]
    batch: Callable[[], dict[str, Any]]


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
        return _loss(self.out(x), y)


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
        return _loss(self.out(self.pairs(x)), y)


def _loss(output: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    # Random targets keep loss and gradients away from zero, where relative differences are meaningless.
    return output.square().mean() if target is None else (output - target).square().mean()


def _rows(dim: int = 8) -> Callable[[], dict[str, Any]]:
    return lambda: {"x": torch.randn(4, dim), "y": torch.randn(4, 3)}


def stack(**kwargs: Any) -> Case:
    model = Stack(**kwargs)
    return Case(model, list(model.layers), _rows(kwargs.get("dim", 8)))


def nested(**block: bool) -> Case:
    model = Nested(**block)
    blocks = [block for pair in model.pairs for block in (pair.first, pair.second, pair)]
    return Case(model, blocks, _rows())


def frozen() -> Case:
    case = stack()
    case.blocks[0].requires_grad_(False)
    case.blocks[1].up.weight.requires_grad_(False)  # type: ignore[union-attr]
    return case


def frozen_layers(**kwargs: Any) -> Case:
    case = stack(layers=4, **kwargs)
    for block in case.blocks:
        block.requires_grad_(False)  # gradients pass through, to the input projection
    return case


class Scale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Scaled(nn.Module):
    """Two scales; the partitioner recomputes the first scale for the second scale's gradient."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.first, self.second = Scale(dim), Scale(dim)
        self.out = nn.Linear(dim, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = checkpoint(self.second, self.first(x), use_reentrant=False)
        return _loss(self.out(x), y)


def frozen_first() -> Case:
    model = Scaled()
    model.first.requires_grad_(False)  # and no gradient passes through it
    return Case(model, [model.first, model.second], _rows())


class WithSpare(Block):
    """A block with a parameter that no forward uses."""

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
    # If it is unset, the first forward logs a warning, which is a graph break.
    model.loss_type = "ForCausalLM"
    return Case(model, list(model.transformer.h), _tokens)


def transformer(tied: bool) -> Case:
    from compile_fsdp.tools.bench.llama import ModelConfig, Transformer

    config = ModelConfig(dim=32, layers=2, heads=4, hidden=64, tie_embeddings=tied)
    model = Transformer(config, seq_len=16)
    return Case(model, list(model.layers), _bytes)


def _bytes() -> dict[str, Any]:
    text = torch.randint(0, 256, (2, 17))
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


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
        return _loss(self.out(h), y)


def odd_sizes() -> Case:
    model = OddSizes()
    return Case(model, [model.inp], _rows())


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
        return _loss(self.out(self.second(self.first(self.norm(x)))), y)


def batch_norm() -> Case:
    model = Normed()
    return Case(model, [model.first, model.second], _rows())


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
        return _loss(self.out(x.mean((2, 3))), y)


def convolutions() -> Case:
    model = Convolutions()
    return Case(model, list(model.blocks), lambda: {"x": torch.randn(4, 3, 6, 6), "y": torch.randn(4, 3)})


class Adapted(nn.Module):
    """A frozen linear layer with a trainable low-rank adapter (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def lora() -> Case:
    case = stack(layers=3)
    case.model.requires_grad_(False)
    for layer in case.blocks[:2]:  # the last block stays frozen as a whole
        layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)  # type: ignore[arg-type, assignment]
    return case


class Experts(nn.Module):
    """A soft mixture of experts; the parameter `experts` goes on a separate mesh."""

    def __init__(self, dim: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(dim, count)
        self.experts = nn.Parameter(torch.randn(count, dim, dim) / dim**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        return x + torch.einsum("bd,edf,be->bf", x, self.experts, weights)


def mixture() -> Case:
    model = Stack(layers=2)
    model.layers = nn.ModuleList([Experts(8), Experts(8)])
    return Case(model, list(model.layers), _rows())


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


def tied_ends(hidden_only: bool) -> Case:
    def draw() -> dict[str, Any]:
        return {"tokens": torch.randint(0, 16, (2, 6)), "hidden_only": hidden_only}

    model = TiedEnds()
    return Case(model, [model.block], draw)


class Embedded(nn.Module):
    """An embedding whose backward does not read its weight."""

    def __init__(self, vocabulary: int = 16, dim: int = 8) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(vocabulary, dim), Block(dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.head(self.block(self.embedding(tokens)))
        return nn.functional.cross_entropy(h.flatten(0, 1), tokens.flatten())


def embedded() -> Case:
    model = Embedded()
    return Case(model, [model.embedding, model.block], lambda: {"tokens": torch.randint(0, 16, (2, 6))})


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
        return _loss(self.out(x), y)


def selective() -> Case:
    model = Selective()
    return Case(model, list(model.layers), _rows())


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


def late(in_backward: bool) -> Case:
    model = Stack(layers=3)
    model.layers = nn.ModuleList([Late(each, in_backward) for each in model.layers])
    return Case(model, list(model.layers), _rows())


class Wrapper(nn.Module):
    """A wrapper of the sharded root that does nothing, like a data-parallel wrapper."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.module(**batch)


def wrapped() -> Case:
    case = stack()
    return Case(Wrapper(case.model), case.blocks, case.batch)


class BatchedProduct(nn.Module):
    """A weight read through views of views, which a partitioner may save."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, dim * dim).view(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x[None], self.weight[None].transpose(-2, -1))[0]


def batched_products() -> Case:
    model = Stack()
    model.layers = nn.ModuleList([BatchedProduct(), BatchedProduct()])
    return Case(model, list(model.layers), _rows())


def scaled_outside() -> Case:
    """A root parameter that only the loss reads, like a contrastive loss's temperature."""
    case = stack()
    case.model.scale = nn.Parameter(torch.ones(1))
    return case


def expert_transformer() -> Case:
    """torch's own test model with experts; returns logits."""
    from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

    sizes = {"n_layers": 2, "vocab_size": 64, "max_seq_len": 16, "dim": 16, "n_heads": 2, "num_experts": 4}
    model = Transformer(ModelArgs(dropout_p=0.0, **sizes))
    ends = [model.tok_embeddings, model.norm, model.output]
    return Case(model, [*model.layers, ends], lambda: {"tokens": torch.randint(0, 64, (4, 8))})  # type: ignore[list-item]


CASES: dict[str, Callable[[], Case]] = {
    "mlp": stack,
    "mlp_of_five": lambda: stack(dim=5),
    "batched_products": batched_products,
    "scaled_outside": scaled_outside,
    "expert_transformer": expert_transformer,
    "nested": nested,
    "nested_checkpoint": lambda: nested(checkpointed=True),
    "used_twice": lambda: stack(uses=2),
    "used_three_times": lambda: stack(uses=3),
    "transformer": lambda: transformer(tied=False),
    "transformer_tied": lambda: transformer(tied=True),
    "llama": llama,
    "gpt2": gpt2,
    "checkpoint_inside": lambda: stack(checkpointed=True),
    "checkpoint_outside": lambda: stack(checkpoint_outside=True),
    "frozen": frozen,
    "frozen_first": frozen_first,
    "frozen_layers": frozen_layers,
    "frozen_checkpoint": lambda: frozen_layers(checkpoint_outside=True),
    "uneven": uneven,
    "unused_parameter": unused_parameter,
    "odd_sizes": odd_sizes,
    "batch_norm": batch_norm,
    "convolutions": convolutions,
    "lora": lora,
    "mixture": mixture,
    "embedded": embedded,
    "tied_ends": lambda: tied_ends(hidden_only=False),
    "tied_ends_in_part": lambda: tied_ends(hidden_only=True),
    "selective": selective,
    "late_forward": lambda: late(in_backward=False),
    "late_backward": lambda: late(in_backward=True),
    "wrapped": wrapped,
    "graph_break": lambda: stack(breaks=True),
    "graph_breaks": lambda: stack(breaks=True, layers=10),
}
