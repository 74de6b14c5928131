"""Compiled code sees plain unsharded parameters, where eager code outside of their module sees DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, distribute_tensor

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


class _Quantized(nn.Module):
    """Computes with a frozen int8 weight that tensor parallelism replicates."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        quantized = torch.full((4, 4), 2, dtype=torch.int8)
        self.scale = nn.Parameter(torch.ones(4))
        self.weight = nn.Parameter(distribute_tensor(quantized, mesh, [Replicate()]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return x @ weight.to_local().float() * self.scale


def test_frozen_integer_parameters_may_be_dtensors() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(_Quantized(mesh["tp"]), nn.Linear(4, 4))
        shard_blocks(model, mesh=mesh["dp"])
        compile_whole(model, **AOT_EAGER)(torch.ones(2, 4)).sum().backward()
