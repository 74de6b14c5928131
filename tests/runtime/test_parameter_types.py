"""Compiled code sees plain unsharded parameters, where eager code outside of their module sees DTensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from compile_fsdp.torch_compat.dispatch import FakeTensorMode
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.models.stacks import Stack
from helpers.parity.twins import AOT_EAGER
from helpers.ranks.fake_world import fake_world
from helpers.ranks.tests import on_ranks


class _AsksForType(nn.Module):
    """Drops its input if its block looks sharded: by the parameter's type or by the module's."""

    def __init__(self, by_module: bool) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.by_module = by_module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.block, FSDPModule) if self.by_module else hasattr(self.block.weight, "full_tensor"):
            x = x * 0
        return self.block(x)


@pytest.mark.parametrize(("by_module", "expected"), [(False, [True, False]), (True, [True, True])])
@on_ranks(2)
def test_only_the_module_type_tells_that_a_module_is_sharded(rank: int, by_module: bool, expected: list[bool]) -> None:
    """`expected`: whether the block looks sharded to the root's forward, eager and compiled."""
    found = []
    for is_compiled in (False, True):
        model = _AsksForType(by_module)
        shard_blocks(model)
        if is_compiled:
            compile_whole(model, **AOT_EAGER)
        first, second = model(torch.ones(1, 4)), model(torch.zeros(1, 4))
        found.append(torch.equal(first, second))
    assert found == expected


def test_model_of_fake_tensors_may_run_eagerly_before_it_is_compiled() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = shard_blocks(Stack(), mesh=mesh)
            model(torch.ones(3, 8))
            compile_whole(model, **AOT_EAGER)(torch.ones(3, 8)).backward()
