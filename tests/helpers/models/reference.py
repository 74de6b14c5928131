"""Reference models of the parity tests, with blocks and batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from helpers.models import layers
from helpers.models.stacks import Nested, Stack


@dataclass
class Case:
    """A model to train."""

    model: nn.Module  # its forward returns a scalar loss, or an output with a `loss`
    blocks: list[nn.Module]  # to shard before the root, in order
    batch: Callable[[], dict[str, Any]]  # draws the keyword arguments of one forward


def _rows(dim: int = 8) -> Callable[[], dict[str, Any]]:
    return lambda: {"x": torch.randn(4, dim), "y": torch.randn(4, 3)}


def _images() -> dict[str, Any]:
    return {"x": torch.randn(4, 3, 6, 6), "y": torch.randn(4, 3)}


def _words() -> dict[str, Any]:
    return {"tokens": torch.randint(0, 16, (2, 6))}


def _case(model: nn.Module, *blocks: str, batch: Callable[[], dict[str, Any]] | None = None) -> Case:
    """A case of the model with the named blocks; its batches are rows of 8 features by default."""
    return Case(model, [model.get_submodule(name) for name in blocks], batch or _rows())


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


def frozen_first() -> Case:
    model = layers.Scaled()
    model.first.requires_grad_(False)  # and no gradient passes through it
    return _case(model, "first", "second")


def _tokens() -> dict[str, Any]:
    tokens = torch.randint(0, 64, (2, 16))
    return {"input_ids": tokens, "labels": tokens}


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(config)
    return Case(model, list(model.model.layers), _tokens)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, use_cache=False, **dropouts)
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


def lora() -> Case:
    case = stack(layers=3)
    case.model.requires_grad_(False)
    for layer in case.blocks[:2]:  # the last block stays frozen as a whole
        layer.up, layer.down = layers.Adapted(layer.up), layers.Adapted(layer.down)  # type: ignore[arg-type, assignment]
    return case


def with_layers(*layers: nn.Module) -> Case:
    """A stack whose blocks are these layers."""
    model = Stack()
    model.layers = nn.ModuleList(layers)
    return Case(model, list(layers), _rows())


def tied_ends(hidden_only: bool) -> Case:
    return _case(layers.TiedEnds(), "block", batch=lambda: {**_words(), "hidden_only": hidden_only})


def wrapped() -> Case:
    case = stack()
    return Case(layers.Wrapper(case.model), case.blocks, case.batch)


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
    "batched_products": lambda: with_layers(layers.BatchedProduct(), layers.BatchedProduct()),
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
    "uneven": lambda: stack(dim=7),  # no size of any parameter is divisible by 2 or 4
    "unused_parameter": lambda: with_layers(layers.WithSpare(8), layers.Block(8)),
    "odd_sizes": lambda: _case(layers.OddSizes(), "inp"),
    "batch_norm": lambda: _case(layers.Normed(), "first", "second"),
    "convolutions": lambda: _case(layers.Convolutions(), "blocks.0", "blocks.1", batch=_images),
    "lora": lora,
    "mixture": lambda: with_layers(layers.Experts(8), layers.Experts(8)),
    "embedded": lambda: _case(layers.Embedded(), "embedding", "block", batch=_words),
    "tied_ends": lambda: tied_ends(hidden_only=False),
    "tied_ends_in_part": lambda: tied_ends(hidden_only=True),
    "selective": lambda: _case(layers.Selective(), "layers.0", "layers.1"),
    "late_forward": lambda: with_layers(*(layers.Late(each, in_backward=False) for each in stack(layers=3).blocks)),
    "late_backward": lambda: with_layers(*(layers.Late(each, in_backward=True) for each in stack(layers=3).blocks)),
    "wrapped": wrapped,
    "graph_break": lambda: stack(breaks=True),
    "graph_breaks": lambda: stack(breaks=True, layers=10),
}
