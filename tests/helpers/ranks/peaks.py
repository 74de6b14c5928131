"""Peak bytes that torch allocates while a sharded model trains."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from compile_fsdp.tools.bench import measure
from compile_fsdp.wrap import Plan, apply
from helpers.ranks.pools import device_type


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=False)


def peak_bytes(
    make_plan: Callable[[], Plan],
    batch: Callable[[], dict[str, Any]],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    forward_prefetch: int = 0,
    backward_prefetch: int = 1,
) -> int:
    """Peak bytes of sharding a meta-device model, materialising it and training two steps.

    The first step creates the optimizer's state; the second step runs with it in memory.
    """

    def train() -> None:
        model = apply(make_plan())
        model.to_empty(device=device_type())
        for tensor in (*model.parameters(), *model.buffers()):
            nn.init.zeros_(tensor)
        _set_prefetch(model, forward_prefetch, backward_prefetch)
        optimizer = make_optimizer(model)
        inputs = batch()
        for _ in range(2):
            output = model(**inputs)
            loss = getattr(output, "loss", output)
            del output
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()

    return peak_of(train)


def peak_of(train: Callable[[], None]) -> int:
    """Peak bytes that a call allocates on this rank."""
    gc.collect()  # Otherwise garbage of an earlier model could be freed, and counted, during the call.
    if device_type() != "cpu":
        return measure.peak_bytes(train, torch.device(device_type()))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        train()
        # gloo's threads free their memory some time after a collective ends.
        dist.barrier()
        time.sleep(0.05)
    level = peak = 0
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


def _set_prefetch(model: nn.Module, forward: int, backward: int) -> None:
    sharded = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for index, each in enumerate(sharded):
        if forward:
            each.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + forward])
    # In the order in which the forwards end: the root's ends last.
    ended = [*sharded[1:], sharded[0]]
    for index, each in enumerate(ended):
        if backward > 1:
            each.set_modules_to_backward_prefetch(ended[max(0, index - backward) : index][::-1])
