"""Forwards, backwards and updates of the features in the parity table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.parity.check import Trainer
from helpers.ranks.pools import device_type


def set_on(model: Any, setting: str, *arguments: Any) -> None:
    """Call a setter of FSDP2; the model that trains without sharding has none."""
    if hasattr(model, setting):
        getattr(model, setting)(*arguments)


def accumulate(trainer: Trainer, step: int) -> None:
    set_on(trainer.model, "set_requires_gradient_sync", False)
    trainer.forward(0).backward()
    trainer.forward(1).backward()
    set_on(trainer.model, "set_requires_gradient_sync", True)
    trainer.forward(2).backward()


def accumulate_sharded(trainer: Trainer, step: int) -> None:
    trainer.forward(0).backward()
    trainer.forward(1).backward()


def only_for_the_last(setting: str) -> Callable[[Trainer, int], None]:
    """Return a step whose second backward alone has the setting."""

    def step(trainer: Trainer, number: int) -> None:
        for batch, is_last in enumerate((False, True)):
            set_on(trainer.model, setting, is_last)
            trainer.forward(batch).backward()

    return step


def accumulate_unsharded(trainer: Trainer, step: int) -> None:
    set_on(trainer.model, "set_reshard_after_backward", False)
    set_on(trainer.model, "set_requires_gradient_sync", False)
    trainer.forward(0).backward()
    set_on(trainer.model, "set_reshard_after_backward", True)
    set_on(trainer.model, "set_requires_gradient_sync", True)
    trainer.forward(1).backward()


def two_forwards(trainer: Trainer, step: int) -> None:
    first, second = trainer.forward(0), trainer.forward(1)
    (first + second).backward()


def scale_the_loss(trainer: Trainer, step: int) -> None:
    (trainer.forward(0) * trainer.model.scale.exp()).sum().backward()


def penalize(*names: str) -> Callable[[Trainer, int], None]:
    """Return a step that penalizes parameters which stay unsharded after the forward."""

    def step(trainer: Trainer, number: int) -> None:
        loss = trainer.forward(0)
        penalties = [trainer.model.get_parameter(name).square().sum() for name in names]
        (loss + 0.01 * torch.stack(penalties).sum()).backward()

    return step


def penalize_first(trainer: Trainer, step: int) -> None:
    """Compute a penalty between two forwards; its backward runs between theirs."""
    first = trainer.forward(0)
    penalty = trainer.model.out.weight.square().sum()
    second = trainer.forward(1)
    (first + 0.01 * penalty + second).backward()


def square_of_logits(trainer: Trainer, step: int) -> None:
    loss = trainer.model(**trainer.batches[0]).square().mean()
    trainer.losses.append(loss.detach())
    loss.backward()


def two_forwards_two_backwards(trainer: Trainer, step: int) -> None:
    first, second = trainer.forward(0), trainer.forward(1)
    second.backward()
    first.backward()


def with_no_grad(trainer: Trainer, step: int) -> None:
    with torch.no_grad():
        trainer.forward(1)
    trainer.forward(0).backward()


def clip_and_update(trainer: Trainer) -> None:
    nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.1)
    trainer.step_optimizer()


def average_and_update(trainer: Trainer) -> None:
    """Replace the sharded parameters by their exponential moving average after each step."""
    trainer.step_optimizer()
    parameters = list(trainer.model.parameters())
    averages = trainer.extras.setdefault("ema", [parameter.detach().clone() for parameter in parameters])
    with torch.no_grad():
        for average, parameter in zip(averages, parameters, strict=True):
            average.mul_(0.5).add_(parameter, alpha=0.5)
            parameter.copy_(average)


def scale_and_update(trainer: Trainer) -> None:
    # Unscales the gradients and checks them for infinities; the scale grows after every step.
    scaler = trainer.extras.setdefault("scaler", torch.amp.GradScaler(device_type(), init_scale=2.0, growth_interval=1))
    scaler.unscale_(trainer.optimizer)
    scaler.step(trainer.optimizer)
    scaler.update()
    trainer.optimizer.zero_grad()


def scaled(trainer: Trainer, step: int) -> None:
    scaler = trainer.extras.setdefault("scaler", torch.amp.GradScaler(device_type(), init_scale=2.0, growth_interval=1))
    scaler.scale(trainer.forward(0)).backward()
