"""A write in place into an output of a model reaches the gradients of outputs that share its memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compile_fsdp
from compile_fsdp.torch_compat.distributed import local_tensor
from helpers.models.blockwise import compile_whole
from helpers.models.replays import count_replays
from helpers.ranks.tests import on_ranks

Take = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def _base_and_view(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return y, y[:, 2:]


def _views(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return y[:, :3], y[:, 2:], y + 1.0


def _view_before_its_base(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return y.t()[1], y, y.view(-1)


def _views_of_two_tensors(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = y + 1.0
    return y[1:], z[1:], y[:2], z[:2]


def _alone(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return y[1:], y.detach(), y + 1.0


_ALL: tuple[Take, ...] = (_base_and_view, _views, _view_before_its_base, _views_of_two_tensors, _alone)
_TAKES = {each.__name__: each for each in _ALL}


class _Net(nn.Module):
    def __init__(self, take: Take) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.take = take

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.take(self.linear(x))


def _gradients(model: Any, written: int) -> list[torch.Tensor]:
    """Take two steps; return the gradients of each."""
    found = []
    for _ in range(2):
        model.zero_grad()
        outputs = model(torch.linspace(0.0, 1.0, 12).view(3, 4))
        outputs[written].mul_(2.0)
        sum(each.square().sum() for each in outputs).backward()
        found += [local_tensor(each.grad).clone() for each in model.parameters()]
    return found


def _check(take: Take, written: int, **options: Any) -> Any:
    """Compare with the same model without sharding; return the compiled model."""
    model = compile_whole(compile_fsdp.fully_shard(_Net(take)), **options)
    assert all(map(torch.allclose, _gradients(model, written), _gradients(_Net(take), written)))
    return model


@pytest.mark.parametrize("name", _TAKES)
@on_ranks(1)
def test_outputs_that_share_memory_have_the_gradients_of_an_unsharded_model(rank: int, name: str) -> None:
    take = _TAKES[name]
    for written in range(len(take(torch.zeros(3, 4)))):
        _check(take, written, inner_backend="aot_eager")


@on_ranks(1, since="2.13")
def test_replayed_steps_have_these_gradients(rank: int, tmp_path: Path) -> None:
    for written, replays in enumerate([(1, 1), (2, 2)]):
        model = _check(_base_and_view, written, bundle=str(tmp_path / "step.bundle"))
        assert count_replays(model) == replays
