"""A sharded module gets the objects that eager FSDP2 hands it: containers to write into, and aliases of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from helpers.parity.check import Parity, compare, compare_grads
from helpers.parity.twins import build_both
from helpers.ranks.tests import on_ranks


@dataclass
class _Batch:
    x: torch.Tensor
    scale: float = 2.0


def _write(layer: _Layer, x: torch.Tensor, written: Any) -> torch.Tensor:
    """Append to a list and add to a dict, both without tensors that need a gradient, and to one with such a tensor."""
    norms, total, kept = written
    hidden = layer(x, norms, total=total, kept=kept)
    return hidden * (1 + len(norms) + len(kept)) + sum(norms) + total["mean"]  # type: ignore[no-any-return]


def _hook(layer: _Layer, x: torch.Tensor, written: Any) -> torch.Tensor:
    return x + layer(_Batch(x))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any, norms: Any = None, total: Any = None, kept: Any = None) -> Any:
        if isinstance(x, _Batch):
            hidden = x.x
            hidden.register_hook(lambda grad: grad * 0.1)  # of this path only, because the layer has an alias
            return self.linear(hidden) * x.scale
        hidden = torch.tanh(self.linear(x))
        norms.append(hidden.detach().norm())
        total["mean"] = total.get("mean", 0.0) + hidden.detach().mean()
        kept.append(1)
        return hidden


class _Model(nn.Module):
    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inp, self.layers, self.use = nn.Linear(8, 8), nn.ModuleList(_Layer() for _ in range(2)), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        written: Any = [], {}, [x]
        for layer in self.layers:
            x = self.use(layer, x, written)
        return x


USES = {"written containers": _write, "hook on a tensor in a dataclass": _hook}


@pytest.mark.parametrize("use", USES)
@on_ranks(2, since="2.13")  # eager FSDP2 of earlier releases copies all containers
def test_containers_and_tensors_of_inputs_are_those_of_eager(rank: int, use: str) -> None:
    def build(fully_shard: Any) -> Any:
        model = _Model(USES[use])
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)

    eager, ours = build_both(build)
    torch.manual_seed(rank)
    x, result = torch.randn(4, 8), Parity()
    outputs = [model(x) for model in (ours, eager)]
    compare(result, "output", *(each.detach() for each in outputs))
    for output in outputs:
        output.square().mean().backward()
    compare_grads(result, "step", ours, eager)
    assert result.differing == []
