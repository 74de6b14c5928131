"""A replayed step sees what changes in the inputs and hooks of each call."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from compile_fsdp.torch_compat.dynamo import CAN_REPLAY
from helpers.models.replays import compile_with_replay, count_replays
from helpers.parity.check import full
from helpers.ranks.tests import on_ranks

pytestmark = pytest.mark.skipif(not CAN_REPLAY, reason="torch 2.13 has brought it")


class _Compares(nn.Module):
    """Asks whether its inputs are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.own(x) if x is y else self.cross(x) + y).square().mean()


class _Limit:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def scale(self, grad: torch.Tensor) -> torch.Tensor:
        return grad * self.factor


class _Hooks(nn.Linear):
    """Puts a hook of its argument on an activation."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor, limit: _Limit) -> torch.Tensor:
        hidden = super().forward(x).tanh()
        hidden.register_hook(limit.scale)
        return hidden.square().mean()


# By name: the model, the arguments of four calls, and the replayed forwards and backwards.
X, Y = torch.ones(3, 4), torch.full((3, 4), 2.0)
CALLS: dict[str, tuple[Any, list[tuple[Any, ...]], tuple[int, int]]] = {
    "one tensor": (_Compares, [(X, Y), (X, Y), (X, X), (Y, X)], (2, 2)),
    "two tensors": (_Compares, [(X, X), (Y, Y), (X, Y), (Y, Y)], (2, 2)),
    "another object with a hook": (_Hooks, [(X, _Limit(factor)) for factor in (1.0, 1.0, 3.0, 1.0)], (3, 2)),
}


@pytest.mark.parametrize("name", CALLS)
@on_ranks(1)
def test_step_is_replayed_only_if_the_arguments_are_alike(rank: int, name: str) -> None:
    kind, calls, replays = CALLS[name]
    found: list[list[Any]] = []
    for fully_shard in (torch_fully_shard, compile_fsdp.fully_shard):
        torch.manual_seed(0)
        model = fully_shard(kind())
        if fully_shard is compile_fsdp.fully_shard:
            compile_with_replay(model, backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
        for arguments in calls:
            model.zero_grad()
            model(*arguments).backward()
            found.append([None if each.grad is None else full(each.grad).clone() for each in model.parameters()])
    for theirs, ours in zip(found[: len(calls)], found[len(calls) :], strict=True):
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    assert count_replays(model) == replays


@on_ranks(1)
def test_replaced_shards_are_freed(rank: int) -> None:
    model = compile_fsdp.fully_shard(nn.Linear(4, 4))
    compile_with_replay(model, backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
    for _ in range(3):
        model(X).sum().backward()
    assert count_replays(model) == (2, 2)
    (group,) = model._get_fsdp_state()._fsdp_param_groups
    shards = [weakref.ref(param._sharded_param_data) for param in group.fsdp_params]
    model.zero_grad()
    model.to(torch.float64)
    gc.collect()
    assert [shard() for shard in shards] == [None, None]


class _TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


def _add(weight: float, first: torch.Tensor, second: torch.Tensor) -> None:
    """Add two outputs, which get one tensor as gradient if nothing scales the second."""
    (first + (second if weight == 1 else weight * second)).backward(Y)


def _give_input(weight: float, first: torch.Tensor, second: torch.Tensor) -> None:
    """Give the forward's input, which the backward reads, or another tensor as gradient."""
    first.backward(X if weight == 1 else weight * X)


@pytest.mark.parametrize(("name", "replays"), [("_add", (4, 3)), ("_give_input", (0, 0))])
@on_ranks(1)
def test_backward_is_replayed_only_if_the_same_of_its_inputs_are_one_tensor(
    rank: int, name: str, replays: tuple[int, int]
) -> None:
    run, found = globals()[name], []
    for fully_shard in (torch_fully_shard, compile_fsdp.fully_shard):
        torch.manual_seed(0)
        model: Any = fully_shard(_TwoOutputs())
        if fully_shard is compile_fsdp.fully_shard:
            compile_with_replay(model, backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
        gradients = []
        for weight in (1.0, 1.0, 0.25, 0.25, 1.0):
            model.zero_grad()
            run(weight, *model(X))
            gradients += [None if each.grad is None else full(each.grad).clone() for each in model.parameters()]
        found.append(gradients)
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert count_replays(model) == replays
