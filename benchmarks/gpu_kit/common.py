"""What the steps of the GPU kit share: a device, its process group, and a model whose training is compared."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from compile_fsdp.tools import launch
from compile_fsdp.tools.bench.llama import ModelConfig, Transformer
from compile_fsdp.torch_compat.distributed import local_tensor
from helpers.parity.check import relative_difference
from helpers.ranks.devices import prepare

CONFIG = ModelConfig(dim=256, layers=2, heads=4, hidden=704)
SEQ_LEN = 64


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that knows the device."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda")
    return made


def start_alone(device: str) -> None:
    """Be the only rank, on NCCL if the device is a GPU, and let tensors be made there."""
    prepare(device, 0)
    launch.join(torch.device(device))


def build(fully_shard: Callable[..., Any]) -> nn.Module:
    """A decoder of 2 blocks in float32, with the same weights at every call."""
    torch.manual_seed(0)
    model = Transformer(CONFIG, SEQ_LEN)
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    return model


def build_pair(**compile_args: Any) -> tuple[nn.Module, nn.Module]:
    """The model on torch's eager FSDP2, and the same compiled with ours."""
    eager, ours = build(torch_fully_shard), build(compile_fsdp.fully_shard)
    ours.compile(backend="compile_fsdp", fullgraph=True, **compile_args)
    return eager, ours


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, int64 (2, SEQ_LEN)."""
    torch.manual_seed(1000 + step)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, SEQ_LEN + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def worst_difference(ours: nn.Module, eager: nn.Module) -> float:
    """Largest difference of a gradient over the largest value of that gradient, on this rank."""
    pairs = zip(ours.parameters(), eager.parameters(), strict=True)
    return max(relative_difference(local_tensor(mine.grad), local_tensor(theirs.grad)) for mine, theirs in pairs)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(map(str, row)) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines) + "\n"
