"""User control over gathers of a compiled model: pending unshards and shared streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp import share_comm_ctx

import compile_fsdp
from compile_fsdp.runtime.attached import module_hooks_of
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.parity.twins import AOT_EAGER
from helpers.ranks.fake_world import fake_world
from helpers.ranks.recording import collectives_of
from helpers.ranks.tests import on_ranks


def test_parameter_that_is_unsharded_before_the_first_forward_has_a_name() -> None:
    with fake_world(2):
        model: Any = nn.Sequential(nn.Linear(4, 4, bias=False))
        compile_fsdp.fully_shard(model[0]).unshard()
        compile_fsdp.fully_shard(model).compile(backend="compile_fsdp", fullgraph=True, options=AOT_EAGER)
        model(torch.randn(2, 4))
        group = module_hooks_of(model[0]).hooks.groups[0]
        assert [group.fqn(param.unsharded_param) for param in group.params] == ["weight"]


def _one(model: Any, step: int) -> None:
    model[1].unshard(async_op=True)


def _all(model: Any, step: int) -> None:
    for block in model:
        block.unshard(async_op=True)


def _sometimes(model: Any, step: int) -> None:
    if step != 1:
        handle = model[0].unshard(async_op=True)
        if step == 2:
            handle.wait()


# Called before each step of a root. The steps share two graphs.
_PENDING = (*(_one,) * 2, *(_all,) * 2, *(_sometimes,) * 4)


def _train(rank: int, fully_shard: Any, roots: int) -> tuple[list[torch.Tensor], list[int]]:
    """Return the parameters after all steps, and the number of collectives of each step."""
    torch.manual_seed(0)
    models: list[Any] = []
    for _ in range(roots):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        models.append(shard_blocks(model, fully_shard))
        if fully_shard is compile_fsdp.fully_shard:
            compile_whole(model, **AOT_EAGER)
    if roots > 1:
        share_comm_ctx(models)
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    counts = []
    for step in range(8 if roots == 1 else 3):

        def run(step: int = step) -> None:
            if roots == 1:
                _PENDING[step](models[0], step - 4)
            x = torch.full((2, 4), 0.1 * (step + rank))
            for model in models:
                x = model(x)
            x.square().mean().backward()

        counts.append(len(collectives_of(run)))
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in parameters], counts


@pytest.mark.parametrize("roots", [1, 2], ids=["pending unshards", "roots with a shared comm context"])
@on_ranks(2)
def test_gathers_are_completed_as_in_eager(rank: int, roots: int) -> None:
    eager, eager_counts = _train(rank, torch_fully_shard, roots)
    ours, counts = _train(rank, compile_fsdp.fully_shard, roots)
    assert all(map(torch.equal, ours, eager))
    assert counts[1:] == eager_counts[1:]
    # Eager's first root prefetches the second root in its backward of the first step.
    assert counts[0] == eager_counts[0] if roots == 1 else counts[0] <= eager_counts[0]
