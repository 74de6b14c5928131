"""An accelerate loop on two ranks: one scenario, eager and compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

import compile_fsdp
from compile_fsdp.integrations.accelerate import prepare
from helpers.models.reference import Stack
from helpers.parity.trainers import Comparison, Trained, compare_resumed, compare_trained, run_scenario, train_both
from helpers.parity.twins import AOT_EAGER


class Loop:
    """One training run, eager or compiled, with two microbatches per step."""

    def __init__(self, compiled: bool, options: dict[str, Any] = AOT_EAGER, **plugin: Any) -> None:
        AcceleratorState._reset_state()
        torch._dynamo.reset()
        compile_fsdp.reset_reports()
        plugin = {
            "fsdp_version": 2,
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": ["Block"],
            "cpu_ram_efficient_loading": False,
        } | plugin
        fsdp = FullyShardedDataParallelPlugin(**plugin)
        self.accelerator = Accelerator(fsdp_plugin=fsdp, cpu=True, gradient_accumulation_steps=2)
        # On a CPU, accelerate would use DDP.
        PartialState._shared_state["distributed_type"] = self.accelerator.state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = fsdp
        torch.manual_seed(0)
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model: nn.Module
        self.optimizer: Any
        if compiled:
            self.model, self.optimizer = prepare(self.accelerator, model, optimizer, options=options)
        else:
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + self.accelerator.process_index)
        for _ in range(2):
            with self.accelerator.accumulate(self.model):
                loss = self.model(torch.randn(4, 8, generator=generator))
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def train(self, steps: range) -> Trained:
        for number in steps:
            self.step(number)
        return Trained.of(self.losses, self.model)


def train(**settings: Any) -> Comparison:
    return train_both(lambda compiled: Loop(compiled, **settings).train(range(3)))


def resume() -> Comparison:
    """Repeat the last two steps from eager and compiled checkpoints."""
    whole = {}
    for compiled in (False, True):
        loop = Loop(compiled)
        loop.train(range(2))
        loop.accelerator.save_state(f"saved_{compiled}")
        whole[compiled] = loop.train(range(2, 4))

    def start(saved_by: bool, resumed_by: bool) -> Trained:
        loop = Loop(resumed_by)
        loop.accelerator.load_state(f"saved_{saved_by}")
        return loop.train(range(2, 4))

    expected = Trained(whole[False].losses[4:], whole[False].parameters)
    return compare_resumed(compare_trained(whole[False], whole[True]), expected, start)


SCENARIOS: dict[str, Callable[[], Comparison]] = {
    "inductor": lambda: train(options={}),
    "aot_eager": train,
    "activation checkpointing": lambda: train(activation_checkpointing=True),
    "resumed": resume,
}

if __name__ == "__main__":
    run_scenario(SCENARIOS, sys.argv[1])
