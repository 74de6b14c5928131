"""Calls that a compiled model runs eagerly, on tensors of the user or with tangents, match eager FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call

import compile_fsdp
from compile_fsdp.errors import ReplacedParameterError, UnsupportedFeatureError
from helpers.models.blockwise import shard_blocks
from helpers.parity.check import Parity, compare, compare_grads
from helpers.parity.twins import AOT_EAGER, build_both
from helpers.ranks.fake_world import fake_world
from helpers.ranks.tests import on_ranks


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())  # type: ignore[no-any-return]


def _build(fully_shard: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), _Tied())
    fully_shard(model[0])
    return fully_shard(model)


def _by_call(model: Any, x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return functional_call(model, {"2.first.bias": new}, x)  # type: ignore[no-any-return]


def _by_assignment(model: Any, x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    kept, model[2].first.bias = model[2].first.bias, nn.Parameter(new.detach())
    output: torch.Tensor = model(x)
    model[2].first.bias = kept
    return output


def _one_of_the_tied(model: Any, x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return functional_call(model, {"2.last.weight": new.expand(4, 4)}, x, tie_weights=False)  # type: ignore[no-any-return]


def _of_a_block(model: Any, x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    model[0].unshard()
    return functional_call(model, {"0.bias": new}, x)  # type: ignore[no-any-return]


PROGRAMS = {each.__name__.strip("_"): each for each in (_by_call, _by_assignment, _one_of_the_tied, _of_a_block)}


def _results(model: Any, substitute: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Train, with two forwards on a substitute between the steps, the first of which leaves the root unsharded."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    x, new = torch.linspace(-1, 1, 8).reshape(2, 4), torch.ones(4, requires_grad=True)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)
            model(x)
        results += [substitute(model, x, new).detach(), model(x).detach()]
        model[0].reshard()
    loss = substitute(model, x, new).square().mean()
    if substitute is not _by_assignment:
        loss.backward()
        assert new.grad is not None
        results.append(new.grad)
    return [*results, loss.detach()]


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(2)
def test_tensors_in_place_of_unsharded_parameters_are_used(rank: int, name: str) -> None:
    torch.manual_seed(0)
    eager, ours = (_results(model, PROGRAMS[name]) for model in build_both(_build))
    pairs = enumerate(zip(eager, ours, strict=True))
    assert [i for i, (one, other) in pairs if not torch.equal(one, other)] == []


@on_ranks(2)
def test_forward_mode_tangents_match(rank: int) -> None:
    """Before and behind a training step."""
    models = build_both(_build)
    for _ in range(2):
        with torch.no_grad(), forward_ad.dual_level():
            x = forward_ad.make_dual(torch.ones(2, 4), torch.full((2, 4), 0.5))
            one, other = (forward_ad.unpack_dual(model(x)).tangent for model in models)
        assert one is not None and other is not None
        assert torch.equal(one, other)
        for model in models:
            model(torch.ones(2, 4)).square().mean().backward()


def test_functions_that_are_compiled_refuse_substitutes() -> None:
    with fake_world(2), torch.no_grad():
        model: Any = compile_fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4)), reshard_after_forward=False)
        compiled = torch.compile(model, backend="compile_fsdp", options=AOT_EAGER)
        x = torch.ones(1, 4)
        for _ in range(2):
            compiled(x)
        kept, model[0].weight = model[0].weight, nn.Parameter(torch.ones(4, 4))
        with pytest.raises(ReplacedParameterError, match="expected the unsharded parameter weight in the root"):
            compiled(x)
        model[0].weight = kept
        compiled(x)


def _shard_to_two(fully_shard: Any) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return shard_blocks(model, fully_shard, reshard_after_forward=2)


@on_ranks(4)
def test_eager_forwards_may_leave_post_forward_shards_to_a_compiled_one(rank: int) -> None:
    models, result = build_both(_shard_to_two), Parity()
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        x, losses = torch.randn(4, 8), []
        for model in models:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                model(x)
            losses.append(model(x).square().mean())
            losses[-1].backward()
        compare(result, f"step {step}: loss", *losses)
        compare_grads(result, f"step {step}", *models)
    assert result.differing == []


def test_functions_that_are_compiled_refuse_post_forward_shards_of_an_eager_forward() -> None:
    with fake_world(4), torch.no_grad():
        model, x = _shard_to_two(compile_fsdp.fully_shard), torch.ones(2, 8)
        model(x)
        compiled = torch.compile(model, backend="compile_fsdp", fullgraph=True, options=AOT_EAGER)
        with pytest.raises(UnsupportedFeatureError, match=r"post-forward shards of an eager forward: call its reshard"):
            compiled(x)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        compiled(x)
