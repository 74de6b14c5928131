"""A small training script; each test replaces parts of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

_SCRIPT = """\
import torch
import torch.distributed as dist
from torch import nn
from compile_fsdp import fully_shard

dist.init_process_group("nccl")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        {line}
        return y.relu()

model = nn.Sequential(Block(), nn.Linear(8, 4))
{shard}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{compile}
for step in range(100):
    model(torch.randn({batch}, 8)).sum().backward()
    {step}
    {end}
print("ran to its end")
"""

_USUAL = {
    "line": "pass",
    "shard": "for module in (model[0], model):\n    fully_shard(module)",
    "compile": 'model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "eager"})',
    "batch": "4",
    "step": "optimizer.step()",
    "end": "optimizer.zero_grad()",
}

WriteScript = Callable[..., Path]


@pytest.fixture
def write_script(tmp_path: Path) -> WriteScript:
    """Function that writes the script with some parts replaced."""
    torch._dynamo.reset()

    def write(**parts: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(_SCRIPT.format(**(_USUAL | parts)))
        return path

    return write
