"""Compiled and eager steps in any order train as eager FSDP2, because they share state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from compile_fsdp.errors import NotShardedError
from helpers.models.blockwise import shard_blocks
from helpers.parity.check import Parity, build, compare_grads, loss_of
from helpers.parity.twins import AOT_EAGER, Twins
from helpers.ranks.fake_world import fake_world
from helpers.ranks.tests import on_ranks


def _eager_and_compiled_steps(rank: int) -> Parity:
    twins = Twins(rank)
    for compiled in (True, False, True, True, False, False, True):
        with torch.compiler.set_stance("default" if compiled else "force_eager"):
            twins.train()
    losses = [loss_of(case.model, twins.batch()) for case in (twins.eager, twins.ours)]
    with torch.compiler.set_stance("force_eager"):
        for loss in losses:
            loss.backward()
    compare_grads(twins.result, "backward under force_eager", twins.ours.model, twins.eager.model)
    return twins.result


def _unshard_and_reshard(rank: int) -> Parity:
    twins = Twins(rank)
    twins.train()
    for case in (twins.eager, twins.ours):
        case.model.unshard()
        case.blocks[0].unshard()
    twins.train()
    for case in (twins.eager, twins.ours):
        case.blocks[1].unshard()
        case.blocks[1].reshard()
    twins.train()
    return twins.result


def _recompile_limit(rank: int) -> Parity:
    twins = Twins(rank, fullgraph=False, dynamic=False)
    rows = iter([4, 5, 6, 7, 4, 8])
    twins.eager.batch = lambda: {"x": torch.randn(next(rows), 8)}  # type: ignore[method-assign]
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(6):
            twins.train()
    return twins.result


def _frozen_values_change(rank: int, is_listed: bool) -> Parity:
    twins = Twins(rank, "frozen_first")
    for case in (twins.eager, twins.ours):
        if is_listed:
            frozen, trained = case.blocks
            trained.set_modules_to_backward_prefetch([frozen])
    twins.train()
    for _ in range(2):
        # The next step must not use a copy of the frozen block that a backward gathered before this change.
        for case in (twins.eager, twins.ours):
            with torch.no_grad():
                for parameter in case.blocks[0].parameters():
                    parameter.mul_(1.5)
        twins.train()
    assert len(compile_fsdp.reports()) == 2
    return twins.result


_PROGRAMS: dict[str, Callable[[int], Parity]] = {
    "eager_and_compiled_steps": _eager_and_compiled_steps,
    "unshard_and_reshard": _unshard_and_reshard,
    "recompile_limit": _recompile_limit,
    "frozen_values_change": partial(_frozen_values_change, is_listed=False),
    "frozen_and_prefetched_values_change": partial(_frozen_values_change, is_listed=True),
}


@pytest.mark.parametrize("name", _PROGRAMS)
@on_ranks(2)
def test_mixed_steps_are_bitwise_equal_to_eager(rank: int, name: str) -> None:
    assert _PROGRAMS[name](rank).differing == []


class _Called(nn.Module):
    """A model that is called through a function, for the loops of `Twins`."""

    def __init__(self, model: nn.Module, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.function(x, y)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)


@pytest.mark.parametrize("way", ["torch.compile", "function", "make_traceable"])
@on_ranks(2)
def test_each_way_to_compile_makes_one_forward_and_one_backward_graph(rank: int, way: str) -> None:
    twins = Twins(rank)
    model, reference = twins.ours.model, twins.eager.model
    model._compiled_call_impl = None  # type: ignore[assignment]  # undo Twins' own compile
    if way == "torch.compile":
        compiled = torch.compile(model, backend="compile_fsdp", fullgraph=True, options=AOT_EAGER)
        twins.ours.model = _Called(model, compiled)
    elif way == "function":

        def scaled(x: torch.Tensor, y: torch.Tensor, model: nn.Module) -> torch.Tensor:
            return model(x * 2.0, y) / 2.0

        compiled = torch.compile(scaled, backend="compile_fsdp", fullgraph=True, options=AOT_EAGER)
        twins.ours.model = _Called(model, lambda x, y: compiled(x, y, model))
        twins.eager.model = _Called(reference, lambda x, y: scaled(x, y, reference))
    else:
        twins.ours = build("mlp", torch_fully_shard)
        for _ in range(2):  # the second call changes nothing
            assert compile_fsdp.make_traceable(twins.ours.model) is twins.ours.model
        twins.ours.model.compile(backend="compile_fsdp", fullgraph=True, options=AOT_EAGER)
        twins.optimizers[1] = torch.optim.SGD(twins.ours.model.parameters(), lr=0.1)
    for _ in range(3):
        twins.train()
    assert twins.result.differing == []
    assert [report.direction for report in compile_fsdp.reports()] == ["forward", "backward"]


@on_ranks(1)
def test_single_rank_is_bitwise_equal_to_eager(rank: int) -> None:
    twins = Twins(rank)
    for _ in range(3):
        twins.train()
    assert twins.result.differing == []


def test_part_of_a_model_that_is_made_traceable_runs_eagerly_only() -> None:
    with fake_world(2):
        model = shard_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch_fully_shard)
        compile_fsdp.make_traceable(model[0])
        model(torch.ones(2, 4)).sum().backward()
        model.compile(backend="compile_fsdp", options=AOT_EAGER)
        expected = r"expected traceable modules only, got the root \(Sequential\), 1 \(Linear\), sharded "
        with pytest.raises(NotShardedError, match=expected):
            model(torch.ones(2, 4))


@pytest.mark.parametrize("shard", [torch_fully_shard, replicate])
def test_slice_of_a_traceable_container_is_the_users_container(shard: Any) -> None:
    with fake_world(2):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        shard(model)
        assert type(compile_fsdp.make_traceable(model)[:2]) is nn.Sequential
