"""What an estimate says: formulas against plans, sharded models and counted collectives; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from compile_fsdp.errors import EstimateError
from compile_fsdp.tools.planning import Optimizer, estimate
from compile_fsdp.tools.planning.amounts import Amount, B, N, S, constant, maximum, rows
from compile_fsdp.tools.planning.polynomials import Fit
from compile_fsdp.wrap import apply, plan
from helpers.ranks.fake_world import fake_world
from helpers.ranks.pools import run_ranks
from helpers.ranks.recording import collectives_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 10)
        self.back = nn.Linear(10, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(torch.tanh(self.linear(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.register_buffer("scale", torch.ones(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def meta_model() -> nn.Module:
    with torch.device("meta"):
        return Model()


def tokens(batch: int, seq_len: int) -> dict[str, Any]:
    return {"tokens": torch.zeros(batch, seq_len, dtype=torch.int64)}


@pytest.mark.parametrize("ranks", [2, 5, 7, 64])
def test_shards_are_those_of_the_sharded_model(ranks: int) -> None:
    found = estimate(meta_model(), tokens(2, 4)).at(ranks)
    with fake_world(ranks):
        model = apply(plan(meta_model())).to_empty(device="cpu")
        model(**tokens(2, 4)).backward()  # or the root's parameters would be left unsharded
        storages = {each.to_local().untyped_storage().data_ptr(): each for each in model.parameters()}
        held = sum(each.to_local().untyped_storage().nbytes() for each in storages.values())
        assert found["parameters"] == held == sum(group.bytes_per_rank for group in plan(meta_model()).groups)
    assert found["gradients"] == found["parameters"]
    assert found["optimizer"] == 2 * found["parameters"]
    assert found["buffers"] == 5 * 4


def test_formulas_are_exact() -> None:
    found = estimate(meta_model(), tokens, near=(2, 16), optimizer=Optimizer.SGD)
    layer = 28 * sympy.ceiling(10 / N) + 40 * sympy.ceiling(6 / N)
    assert sympy.expand(found.parameters - 3 * layer - 24 * sympy.ceiling(7 / N)) == 0
    assert found.optimizer == 0
    assert found.batch == 8 * B * S
    # Every layer keeps its input and tanh's result; beside them there are the last output and scalars.
    assert found.activations.coeff(B * S) == 4 * (3 * (6 + 10) + 6)


def test_a_fixed_batch_gives_the_values_of_the_formulas() -> None:
    open_sizes = estimate(meta_model(), tokens, near=(2, 16))
    assert estimate(meta_model(), tokens(3, 12)).at(4) == open_sizes.at(4, 3, 12)


def _collectives(rank: int, kwargs: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    model = apply(plan(meta_model(), **kwargs)).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model(**tokens(2, 4)).backward()
    issued = collectives_of(lambda: model(**tokens(2, 4)).backward())
    counts = {kind: [each for each in issued if kind in each.kind] for kind in ("all_gather", "reduce")}
    ranks = torch.distributed.get_world_size()
    sizes = {
        "gathered": sum(each.bytes for each in counts["all_gather"]) * (ranks - 1),
        # gloo reduces the whole input of a reduce-scatter on all ranks.
        "reduced": sum(each.bytes for each in counts["reduce"]) * (ranks - 1) // ranks,
    }
    return {kind: len(each) for kind, each in counts.items()}, sizes


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"reshard_after_forward": False},
        {"reshard_after_forward": True},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    ],
)
def test_collectives_are_those_of_a_step(kwargs: dict[str, Any]) -> None:
    found = estimate(plan(meta_model(), **kwargs), tokens(2, 4)).at(2)
    counts, sizes = run_ranks(2, _collectives, kwargs)[0]
    assert (found["all_gathers"], found["reduce_scatters"]) == (counts["all_gather"], counts["reduce"])
    assert {name: found[name] for name in sizes} == sizes


def test_frozen_and_ignored_parameters() -> None:
    model = meta_model()
    model.get_submodule("layers.0").requires_grad_(False)
    ignored = model.get_submodule("layers.2")
    found = estimate(plan(model, ignored_modules=[ignored]), tokens(2, 4)).at(2)
    layer = 4 * (5 * 6 + 5 + 3 * 10)  # rows of 2 ranks: (5, 6), (5,) and (3, 10)
    assert found["parameters"] - found["gradients"] == layer
    assert found["gradients"] == layer + 4 * 4 * 6 + sum(each.nbytes for each in ignored.parameters())
    assert found["reduce_scatters"] == 2


def test_the_model_stays_as_it_was() -> None:
    model = meta_model()
    before = dict(model.named_parameters())
    estimate(model, tokens(2, 4))
    after = dict(model.named_parameters())
    assert all(after[fqn] is parameter and parameter.grad is None for fqn, parameter in before.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_maximum_keeps_what_is_larger_somewhere() -> None:
    one = constant(1)
    shard = Amount({rows(8): one[sympy.Integer(1)]})
    layers = [total + shard for total in (constant(5), constant(3))]
    # A straight line between its ends: 10 + 0, 5 + r, 0 + 2 r, and what the first of these dominates.
    line = [constant(10), constant(5) + shard, shard + shard, constant(9)]
    assert set(maximum(line).args) == {sympy.Integer(10), 2 * rows(8)}
    assert maximum(layers) == rows(8) + 5
    bent = [constant(10), constant(8) + shard, shard + shard]
    for ranks in (2, 3, 8):
        values = [int(each.expression().subs({N: ranks})) for each in bent]
        assert int(maximum(bent).subs({N: ranks})) == max(values)


def test_sizes_that_are_no_polynomial_are_refused() -> None:
    fit = Fit.near(2, 16)
    values = [3 * b * s * s + b + 7 for b, s in fit.points]
    assert sympy.expand(fit.polynomial(values).expression() - (3 * B * S**2 + B + 7)) == 0
    with pytest.raises(EstimateError, match="pass a fixed batch"):
        fit.polynomial([b * b * s for b, s in fit.points])


class NoLoss(Model):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens)


def test_refusals() -> None:
    with pytest.raises(EstimateError, match=r"reshard_after_forward=2"):
        estimate(_with_kwargs(reshard_after_forward=2), tokens(2, 4))
    with pytest.raises(EstimateError, match="CPUOffloadPolicy"):
        estimate(_with_kwargs(offload_policy=CPUOffloadPolicy()), tokens(2, 4))
    with torch.device("meta"), pytest.raises(EstimateError, match="expected a model that returns a loss"):
        estimate(NoLoss(), tokens(2, 4))
    with pytest.raises(EstimateError, match="at least 2 ranks"):
        estimate(meta_model(), tokens(2, 4)).at(1)
    with pytest.raises(EstimateError, match="backward_prefetch of at least 1"):
        estimate(meta_model(), tokens(2, 4), backward_prefetch=0)


def _with_kwargs(**kwargs: Any) -> Any:
    with fake_world(4):
        return plan(meta_model(), **kwargs)
