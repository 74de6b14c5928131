"""User control over gathers of a compiled model: pending unshards and shared streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp import share_comm_ctx

import compile_fsdp
from compile_fsdp.runtime.attached import find_group
from compile_fsdp.torch_compat.fsdp import fsdp_state
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.parity.twins import AOT_EAGER
from helpers.ranks.fake_world import fake_world
from helpers.ranks.pools import run_ranks
from helpers.ranks.recording import collectives_of


def test_parameter_that_is_unsharded_before_the_first_forward_has_a_name() -> None:
    with fake_world(2):
        model: Any = nn.Sequential(nn.Linear(4, 4, bias=False))
        compile_fsdp.fully_shard(model[0]).unshard()
        compile_fsdp.fully_shard(model).compile(backend="compile_fsdp", fullgraph=True, options=AOT_EAGER)
        model(torch.randn(2, 4))
        group = find_group(fsdp_state(model[0])._fsdp_param_group)
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


def _both(rank: int, roots: int) -> tuple[bool, list[int], list[int]]:
    eager, eager_counts = _train(rank, torch_fully_shard, roots)
    ours, counts = _train(rank, compile_fsdp.fully_shard, roots)
    return all(map(torch.equal, ours, eager)), counts, eager_counts


def test_pending_unshards_are_completed_as_in_eager() -> None:
    for equal, ours, eager in run_ranks(2, _both, 1):
        assert equal
        assert ours == eager


def test_roots_with_a_shared_comm_context_match_eager() -> None:
    for equal, ours, eager in run_ranks(2, _both, 2):
        assert equal
        assert ours[1:] == eager[1:]
        assert ours[0] <= eager[0]  # here eager's first root prefetches the second root in its backward
