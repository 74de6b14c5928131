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
from compile_fsdp.torch_compat.dynamo import CAN_REPLAY
from helpers.models.replays import count_replays
from helpers.ranks.pools import run_ranks

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


def _compare(rank: int, name: str, options: dict[str, Any]) -> list[tuple[bool, Any]]:
    """Compare with the same model without sharding, and count replays, for each output that is written."""
    take = _TAKES[name]
    results = []
    for written in range(len(take(torch.zeros(3, 4)))):
        model: Any = compile_fsdp.fully_shard(_Net(take))
        model.compile(backend="compile_fsdp", fullgraph=True, options=options)
        found, expected = _gradients(model, written), _gradients(_Net(take), written)
        replays = count_replays(model) if "bundle" in options else None
        results.append((all(map(torch.allclose, found, expected)), replays))
    return results


@pytest.mark.parametrize("name", _TAKES)
def test_outputs_that_share_memory_have_the_gradients_of_an_unsharded_model(name: str) -> None:
    (results,) = run_ranks(1, _compare, name, {"inner_backend": "aot_eager"})
    assert results == [(True, None)] * len(results)


@pytest.mark.skipif(not CAN_REPLAY, reason="torch 2.13 has brought it")
def test_replayed_steps_have_these_gradients(tmp_path: Path) -> None:
    (results,) = run_ranks(1, _compare, "_base_and_view", {"bundle": str(tmp_path / "step.bundle")})
    assert results == [(True, (1, 1)), (True, (2, 2))]
