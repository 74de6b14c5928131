"""Models sharded with torch's `fully_shard` and compiled in the orders that trainers use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import compile_fsdp
from compile_fsdp.errors import NotShardedError
from helpers.models.reference import Stack
from helpers.parity.check import Parity, compare, compare_grads
from helpers.ranks.pools import device_type
from helpers.ranks.tests import on_ranks

COMPILE: Any = {"backend": "compile_fsdp", "options": {"inner_backend": "aot_eager"}}


def _model() -> Stack:
    torch.manual_seed(0)
    return Stack().to(device_type())


def _shard(blocks: nn.ModuleList, root: nn.Module) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    for module in (*blocks, root):
        fully_shard(module, mesh=mesh)


def _compile_before_sharding(model: Stack) -> nn.Module:
    """Compile first, as accelerate does; the compiled module becomes the root."""
    optimized: nn.Module = torch.compile(model, fullgraph=True, **COMPILE)
    _shard(model.layers, optimized)
    return compile_fsdp.make_traceable(optimized)


def _compile_in_place_before_sharding(model: Stack) -> nn.Module:
    model.compile(**COMPILE)
    _shard(model.layers, model)
    return compile_fsdp.make_traceable(model)


def _compile_again(model: Stack) -> nn.Module:
    _compile_in_place_before_sharding(model).compile(fullgraph=True, **COMPILE)
    return model


def _compile_blocks(model: Stack) -> nn.Module:
    """Shard, then compile each block (regional compilation)."""
    _shard(model.layers, model)
    compile_fsdp.make_traceable(model)
    for block in model.layers:
        block.compile(fullgraph=True, **COMPILE)
    return model


ORDERS: dict[str, Callable[[Stack], nn.Module]] = {
    "before sharding": _compile_before_sharding,
    "in place before sharding": _compile_in_place_before_sharding,
    "in place, and again": _compile_again,
    "block by block": _compile_blocks,
}


@pytest.mark.parametrize(
    ("order", "forwards", "backwards"),
    [
        ("before sharding", 1, 1),
        ("in place before sharding", 2, 1),
        ("in place, and again", 1, 1),
        ("block by block", 2, 2),
    ],
)
@on_ranks(2)
def test_compile_and_shard_orders_match_eager(rank: int, order: str, forwards: int, backwards: int) -> None:
    eager, own = _model(), _model()
    _shard(eager.layers, eager)
    ours = ORDERS[order](own)
    compile_fsdp.reset_reports()
    result = Parity()
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(4, 8, device=device_type())
        losses = [model(x) for model in (ours, eager)]
        for loss in losses:
            loss.backward()
        compare(result, f"step {step}: loss", losses[0].detach(), losses[1].detach())
        compare_grads(result, f"step {step}", own, eager)
    assert result.differing == []
    directions = [report.direction for report in compile_fsdp.reports()]
    assert (directions.count("forward"), directions.count("backward")) == (forwards, backwards)


@on_ranks(2)
def test_error_without_make_traceable_names_the_call(rank: int) -> None:
    model = _model()
    _shard(model.layers, model)
    model.compile(**COMPILE)
    with pytest.raises(NotShardedError, match=r"call compile_fsdp\.make_traceable\(\)"):
        model(torch.randn(4, 8, device=device_type()))
