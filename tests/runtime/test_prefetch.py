"""Positions of all-gathers in the graphs for each prefetch setting.

One process traces one rank of a large world; the collectives do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import compile_fsdp
from helpers.graphs.capture import events, render_step
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.models.layers import Product
from helpers.parity.twins import AOT_EAGER
from helpers.ranks.fake_world import fake_world


def _model(world_size: int) -> nn.Sequential:
    model = nn.Sequential(Product(8, 8), Product(8, 16), Product(16, 24))
    return shard_blocks(model, mesh=init_device_mesh("cpu", (world_size,)))  # type: ignore[no-any-return]


def _events(
    configure: Callable[[nn.Sequential], None] | None = None, world_size: int = 8, **options: Any
) -> tuple[list[str], list[str]]:
    """Events of the forward graph and of the backward graph."""
    with fake_world(world_size):
        model = _model(world_size)
        if configure is not None:
            configure(model)
        forward, _, backward, _ = render_step(model, lambda: model(torch.ones(2, 8)).sum(), **options)
        return events(forward), events(backward)


def test_default_prefetch_gathers_next_group_before_weight_gradient() -> None:
    forward, backward = _events()
    assert forward == ["gather[64]", "mm[2, 8]", "gather[128]", "mm[2, 16]", "gather[384]", "mm[2, 24]"]
    assert backward == [
        "gather[384]",
        "gather[128]",  # before the gradients of the third layer
        "mm[16, 24]",
        "reduce[48]",
        "mm[2, 16]",
        "gather[64]",
        "mm[8, 16]",
        "reduce[16]",
        "mm[2, 8]",
        "mm[8, 8]",
        "reduce[8]",
    ]


def test_backward_post_gathers_next_group_after_weight_gradient() -> None:
    _, backward = _events(backward_prefetch="BACKWARD_POST")
    assert backward[:5] == ["gather[384]", "mm[16, 24]", "gather[128]", "reduce[48]", "mm[2, 16]"]


def test_without_prefetch_each_group_is_gathered_at_its_use() -> None:
    _, backward = _events(backward_prefetch=None)
    assert backward[:5] == ["gather[384]", "mm[16, 24]", "reduce[48]", "mm[2, 16]", "gather[128]"]


def test_forward_prefetch_list_gathers_listed_modules_early() -> None:
    forward, _ = _events(lambda model: model[0].set_modules_to_forward_prefetch([model[1], model[2]]))
    assert forward == ["gather[64]", "gather[128]", "gather[384]", "mm[2, 8]", "mm[2, 16]", "mm[2, 24]"]


def test_backward_prefetch_list_gathers_listed_modules_early() -> None:
    _, backward = _events(lambda model: model[2].set_modules_to_backward_prefetch([model[1], model[0]]))
    assert backward[:4] == ["gather[384]", "gather[128]", "gather[64]", "mm[16, 24]"]


class _Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.sometimes(x) if uses_all else x)  # type: ignore[no-any-return]


def test_backward_prefetch_list_may_have_a_module_that_did_not_run() -> None:
    with fake_world(2):
        model = compile_whole(shard_blocks(_Sometimes()), **AOT_EAGER)
        model.last.set_modules_to_backward_prefetch([model.first, model.sometimes])
        for uses_all in (False, True):
            model(torch.ones(2, 8), uses_all).sum().backward()


@pytest.mark.parametrize("world_size", [pytest.param(64, marks=pytest.mark.slow), 1024])
def test_backward_order_does_not_depend_on_world_size(world_size: int) -> None:
    """Rows are padded to the number of ranks, so only the sizes differ."""
    forward, backward = _events(world_size=world_size)
    assert forward[0] == f"gather[{world_size * 8}]"
    assert [each.split("[")[0] for each in backward] == [
        each.split("[")[0] for each in _events(world_size=8)[1]
    ]


def test_frozen_layers_are_freed_in_the_backward() -> None:
    """Input gradients mark the point, because frozen parameters have no gradient."""
    compile_fsdp.reset_reports()
    with fake_world(8):
        model = _model(8)
        model[1].requires_grad_(False)
        model[2].requires_grad_(False)
        *_, after = render_step(model, lambda: model(torch.ones(2, 8)).sum())
    assert "resize_storage_bytes_" not in after
    assert [report.kept for report in compile_fsdp.reports()] == [(), ()]
