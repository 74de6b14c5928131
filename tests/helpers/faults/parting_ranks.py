"""Train two models on two ranks, then run a different model on each rank."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import compile_fsdp


def _model(width: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))
    for module in (*model, model):
        compile_fsdp.fully_shard(module)
    model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
    return model


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).mean().backward()


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    narrow, wide = _model(8), _model(16)
    for _ in range(3):
        _step(narrow)
        _step(wide)
    dist.barrier()
    _step(narrow if dist.get_rank() else wide)
