"""Differences between torch releases that tests of compiled steps allow for."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from helpers.models.reference import CASES
from helpers.parity.check import loss_of
from helpers.ranks.fake_world import fake_world
from helpers.releases.differences import AOT_ROUNDS_OTHERWISE, KEEPS_GROUPS_IN_PART


class _Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used: torch.Tensor = self.used(x)
        return used


def test_eager_fsdp2_keeps_partly_run_group_unsharded_in_old_releases() -> None:
    with fake_world(2):
        model = _Halves()
        fully_shard([model.used, model.unused])
        fully_shard(model)
        model(torch.ones(1, 2))
        assert isinstance(model.used.weight, DTensor) != KEEPS_GROUPS_IN_PART


def test_aot_eager_rounds_differently_from_eager_in_old_releases() -> None:
    gradients = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        case = CASES["llama"]()
        model = case.model.bfloat16()
        if backend is not None:
            model.compile(backend=backend)
        loss_of(model, case.batch()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    are_equal = all(torch.equal(*each) for each in zip(*gradients, strict=True))
    assert are_equal != AOT_ROUNDS_OTHERWISE
