"""Gradients with respect to inputs only, and several backwards per forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.models.blockwise import shard_blocks
from helpers.parity.twins import build_both
from helpers.ranks.recording import collectives_of
from helpers.ranks.tests import on_ranks

Ask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale
        return x.square().mean()


def _grad(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, x)[0]


def _backward_with_inputs(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    loss.backward(inputs=[x])
    assert x.grad is not None
    return x.grad


def _grad_and_backward(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    assert x.grad is not None
    return torch.stack([grad, x.grad])


def _twice(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.autograd.grad(loss, x, retain_graph=True)[0], _grad(loss, x)])


def _kept(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    loss.backward(retain_graph=True)
    (loss * 2).backward()
    assert x.grad is not None
    return x.grad


def _steps(model: Any, ask: Ask) -> tuple[list[torch.Tensor], list[list[bool]], list[int]]:
    """Alternate `ask` with training steps; return tensors, parameters with gradients, collective counts."""
    grads, have, collectives = [], [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        x, scale = torch.randn(2, 4, requires_grad=True), torch.ones(4, requires_grad=True)
        loss = model(x, scale)
        collectives.append(len(collectives_of(lambda loss=loss, x=x: grads.append(ask(loss, x)))))  # type: ignore[misc]
        assert scale.grad is None or ask in (_grad_and_backward, _kept)
        have.append([parameter.grad is not None for parameter in model.parameters()])
        optimizer.zero_grad()
        model(x, scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*grads, *(parameter.full_tensor().detach() for parameter in model.parameters())], have, collectives


@on_ranks(2)
def test_input_gradients_match_eager(rank: int) -> None:
    """Trains one pair of models by each way in turn; the forward is compiled once."""
    eager, ours = build_both(lambda fully_shard: shard_blocks(_Model(), fully_shard))
    for way in (_grad, _backward_with_inputs, _grad_and_backward, _twice, _kept):
        expected, expected_have, issued = _steps(eager, way)
        found, have, ours_issued = _steps(ours, way)
        assert all(map(torch.equal, found, expected)) and have == expected_have, way
        assert all(own <= other for own, other in zip(ours_issued, issued, strict=True)), way
