"""Train a model on torch's eager FSDP2 and under the backend, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from helpers.parity.check import Parity, build, compare, compare_grads, loss_of

AOT_EAGER = {"inner_backend": "aot_eager"}


def build_both(build: Callable[[Any], Any], **compile_args: Any) -> tuple[Any, Any]:
    """Build equal models: by torch's eager FSDP2, and compiled.

    Args:
        build: Builds and shards a model with the sharding function that it gets.
        compile_args: Arguments of `nn.Module.compile`; by default one graph that runs op by op.
    """
    models = []
    for fully_shard in (torch_fully_shard, compile_fsdp.fully_shard):
        torch.manual_seed(0)
        models.append(build(fully_shard))
    models[1].compile(backend="compile_fsdp", **{"fullgraph": True, "options": AOT_EAGER, **compile_args})
    return models[0], models[1]


class Twins:
    """Two copies of a model: `eager` runs on torch alone, `ours` under the backend."""

    def __init__(self, rank: int, case: str = "mlp", learning_rate: float = 0.1, **compile_args: Any) -> None:
        self.rank = rank
        self.eager = build(case, torch_fully_shard)
        self.ours = build(case, compile_fsdp.fully_shard)
        arguments = {"fullgraph": True, "options": AOT_EAGER, **compile_args}
        self.ours.model.compile(backend="compile_fsdp", **arguments)
        self.optimizers = [torch.optim.SGD(c.model.parameters(), lr=learning_rate) for c in (self.eager, self.ours)]
        self.result = Parity()
        self.steps = 0

    def batch(self) -> dict[str, Any]:
        torch.manual_seed(100 * self.steps + self.rank)
        return self.eager.batch()

    def train(self, update: bool = True) -> None:
        batch = self.batch()
        losses = [loss_of(case.model, batch) for case in (self.eager, self.ours)]
        for loss in losses:
            loss.backward()
        compare(self.result, f"step {self.steps}: loss", losses[1].detach(), losses[0].detach())
        compare_grads(self.result, f"step {self.steps}", self.ours.model, self.eager.model)
        if update:
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        self.steps += 1

    def evaluate(self, mode: Callable[[], Any]) -> None:
        batch = self.batch()
        with mode():
            losses = [loss_of(case.model, batch) for case in (self.eager, self.ours)]
        compare(self.result, f"evaluation before step {self.steps}", losses[1], losses[0])
