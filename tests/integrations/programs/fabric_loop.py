"""A Lightning Fabric loop on two ranks: one scenario, eager and compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import compile_fsdp
from compile_fsdp.integrations.fabric import compiled
from helpers.models.reference import Stack
from helpers.parity.trainers import Comparison, Trained, compare_resumed, compare_trained, run_scenario, train_both
from helpers.parity.twins import AOT_EAGER


def shard(model: Stack, mesh: DeviceMesh) -> Stack:
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["data_parallel"])
    return model


class Loop:
    """One training run, eager or compiled, with two microbatches per step."""

    def __init__(self, compiles: bool, options: dict[str, Any], precision: Any = None) -> None:
        torch._dynamo.reset()
        compile_fsdp.reset_reports()
        parallelize_fn = compiled(shard, options=options) if compiles else shard
        strategy = ModelParallelStrategy(parallelize_fn, data_parallel_size=2, tensor_parallel_size=1)
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
        self.fabric.launch()
        torch.manual_seed(0)
        self.model = self.fabric.setup_module(Stack())
        self.optimizer = self.fabric.setup_optimizers(torch.optim.AdamW(self.model.parameters(), lr=1e-2))
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + self.fabric.global_rank)
        for is_last in (False, True):
            with self.fabric.no_backward_sync(self.model, enabled=not is_last):
                loss = self.model(torch.randn(4, 8, generator=generator))
                self.fabric.backward(loss)
            self.losses.append(loss.item())
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: range) -> Trained:
        for number in steps:
            self.step(number)
        return Trained.of(self.losses, self.model.module)


def train(options: dict[str, Any] = AOT_EAGER, **settings: Any) -> Comparison:
    return train_both(lambda compiles: Loop(compiles, options, **settings).train(range(3)))


def resume() -> Comparison:
    """Repeat the last two steps from eager and compiled checkpoints."""
    whole = {}
    for compiles in (False, True):
        loop = Loop(compiles, AOT_EAGER)
        loop.train(range(2))
        loop.fabric.save(f"saved_{compiles}", {"model": loop.model, "optimizer": loop.optimizer})
        whole[compiles] = loop.train(range(2, 4))

    def start(saved_by: bool, resumed_by: bool) -> Trained:
        loop = Loop(resumed_by, AOT_EAGER)
        loop.fabric.load(f"saved_{saved_by}", {"model": loop.model, "optimizer": loop.optimizer})
        return loop.train(range(2, 4))

    expected = Trained(whole[False].losses[4:], whole[False].parameters)
    return compare_resumed(compare_trained(whole[False], whole[True]), expected, start)


SCENARIOS: dict[str, Callable[[], Comparison]] = {
    "verified": lambda: train(AOT_EAGER | {"verify": True}),
    "bf16-mixed": lambda: train(precision="bf16-mixed"),
    "inductor": lambda: train({}),
    "resumed": resume,
}

if __name__ == "__main__":
    run_scenario(SCENARIOS, sys.argv[1])
