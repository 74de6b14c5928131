"""User control over gathers of a compiled model: pending unshards and shared streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp import share_comm_ctx

import compile_fsdp
from helpers.parity.twins import AOT_EAGER
from helpers.ranks.pools import run_ranks
from helpers.ranks.recording import collectives_of

Before = Callable[[Any, int], None]


def _build(fully_shard: Any) -> Any:
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module)
    if fully_shard is compile_fsdp.fully_shard:
        model.compile(backend="compile_fsdp", fullgraph=True, options=AOT_EAGER)
    return model


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


_BEFORE = {each.__name__.strip("_"): each for each in (_one, _all, _sometimes)}


def _pending(rank: int, name: str) -> tuple[bool, list[int], list[int]]:
    results: list[list[torch.Tensor]] = []
    issued: list[list[int]] = []
    for fully_shard in (torch_fully_shard, compile_fsdp.fully_shard):
        torch.manual_seed(0)
        model = _build(fully_shard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts = []
        for step in range(4):
            x = torch.full((2, 4), 0.1 * (step + rank))

            def run(step: int = step, x: torch.Tensor = x, model: Any = model) -> None:
                _BEFORE[name](model, step)
                model(x).square().mean().backward()

            counts.append(len(collectives_of(run)))
            optimizer.step()
            optimizer.zero_grad()
        issued.append(counts)
        results.append([parameter.full_tensor().detach() for parameter in model.parameters()])
    return all(map(torch.equal, *results)), issued[1], issued[0]


@pytest.mark.parametrize("name", _BEFORE)
def test_pending_unshards_are_completed_as_in_eager(name: str) -> None:
    for equal, ours, eager in run_ranks(2, _pending, name):
        assert equal
        assert ours == eager


def _shared(rank: int) -> tuple[bool, list[int], list[int]]:
    results: list[list[torch.Tensor]] = []
    issued: list[list[int]] = []
    for fully_shard in (torch_fully_shard, compile_fsdp.fully_shard):
        torch.manual_seed(0)
        first, second = _build(fully_shard), _build(fully_shard)
        share_comm_ctx([first, second])
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        counts = []
        for step in range(3):
            x = torch.full((2, 4), 0.1 * (step + rank))

            def run(x: torch.Tensor = x, first: Any = first, second: Any = second) -> None:
                second(first(x)).square().mean().backward()

            counts.append(len(collectives_of(run)))
            optimizer.step()
            optimizer.zero_grad()
        issued.append(counts)
        results.append([parameter.full_tensor().detach() for parameter in parameters])
    return all(map(torch.equal, *results)), issued[1], issued[0]


def test_roots_with_a_shared_comm_context_match_eager() -> None:
    for equal, ours, eager in run_ranks(2, _shared):
        assert equal
        assert ours[1:] == eager[1:]
        assert ours[0] <= eager[0]  # here eager's first root prefetches the second root in its backward
