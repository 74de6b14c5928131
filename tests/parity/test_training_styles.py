"""Training styles beyond a plain loop, compared with eager FSDP2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import compile_fsdp
from helpers.models.blockwise import shard_blocks
from helpers.ranks.tests import on_ranks

_WIDTH = 8


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
        self.adapter: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        if self.adapter is not None:
            hidden = hidden + self.adapter(x)
        return x + self.down(hidden)


class _Experts(nn.Module):
    """Mixture of four experts: top-2 routing without a capacity limit."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDTH, 4)
        self.experts = nn.ModuleList([nn.Linear(_WIDTH, _WIDTH) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            output = output.index_add(0, rows, expert(x[rows]) * weights[rows, places].unsqueeze(-1))
        return x + output


class _GroupedExperts(nn.Module):
    """`_Experts` with one grouped matrix product for any number of tokens per expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDTH, 4)
        self.weight = nn.Parameter(torch.randn(4, _WIDTH, _WIDTH) / _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        ends = nn.functional.one_hot(chosen.flatten(), 4).sum(0).cumsum(0).to(torch.int32)
        tokens, weight = x[order // 2].bfloat16(), self.weight.bfloat16()
        products = nn.functional.grouped_mm(tokens, weight, offs=ends).to(x.dtype)
        return x.index_add(0, order // 2, products * weights.flatten()[order].unsqueeze(-1))


class _SplitAttention(nn.Module):
    """Attention over a sequence split across ranks: all-to-alls swap positions and heads before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ranks, positions = dist.get_world_size(), x.shape[0]
        heads = self.qkv(x).view(positions, 3, ranks, _WIDTH // ranks).permute(2, 0, 1, 3).contiguous()
        whole = functional.all_to_all_single_autograd(heads, None, None, dist.group.WORLD)
        q, k, v = whole.view(ranks * positions, 3, 1, _WIDTH // ranks).permute(1, 2, 0, 3)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).contiguous()
        parts = functional.all_to_all_single_autograd(attended, None, None, dist.group.WORLD)
        return x + self.out(parts.view(ranks, positions, -1).transpose(0, 1).reshape(positions, _WIDTH))


def _model(block: type[nn.Module] = _Block) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(3)))


def _build(fully_shard: Any, compiles: Callable[[Any], None], block: type[nn.Module] = _Block) -> Any:
    model = shard_blocks(_model(block), fully_shard)
    compiles(model)
    return model


def _batch(step: int, rank: int) -> torch.Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randn(6, _WIDTH)


def _values(model: Any) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def _train(model: Any, rank: int, call: Any = None) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        (call or model)(_batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _values(model)


def _with_blocks(block: type[nn.Module], fully_shard: Any, compiles: Any, rank: int) -> list[torch.Tensor]:
    return _train(_build(fully_shard, compiles, block), rank)


def _functional(fully_shard: Any, compiles: Any, rank: int) -> list[torch.Tensor]:
    model = _build(fully_shard, compiles)
    call = functools.partial(torch.func.functional_call, model, {})
    return _train(model, rank, lambda x: call((x,)))


def _muon(fully_shard: Any, compiles: Any, rank: int) -> list[torch.Tensor]:
    """An optimizer that gathers whole matrices; each rank keeps its shard of the update."""
    model = _build(fully_shard, compiles)
    momenta: dict[nn.Parameter, torch.Tensor] = {}
    for step in range(3):
        model(_batch(step, rank)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                momentum = momenta.setdefault(parameter, torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                whole = momentum.full_tensor()
                if whole.ndim == 2:
                    u, _, v = torch.linalg.svd(whole, full_matrices=False)
                    whole = u @ v
                update = DTensor.from_local(whole, parameter.device_mesh, run_check=False)
                parameter.add_(update.redistribute(placements=parameter.placements), alpha=-0.05)
                parameter.grad = None
    return _values(model)


def _averaged(fully_shard: Any, compiles: Any, rank: int) -> list[torch.Tensor]:
    model = _model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for each in (model, average.module):
        compiles(shard_blocks(each, fully_shard))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(_batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    with torch.no_grad():
        output = average(_batch(9, rank))
    return [output, *_values(average), *_values(model)]


def _adapters(fully_shard: Any, compiles: Any, rank: int) -> list[torch.Tensor]:
    """A frozen base with two alternating sets of adapters; step 2 runs without adapters."""
    model = _model()
    sets = [[nn.Linear(_WIDTH, 2 * _WIDTH) for _ in model] for _ in range(2)]
    model.requires_grad_(False)
    for adapters in sets:
        for adapter in adapters:
            fully_shard(adapter)
    compiles(shard_blocks(model, fully_shard))
    parameters = [parameter for adapters in sets for adapter in adapters for parameter in adapter.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(5):
        for block, adapter in zip(model, sets[step % 2], strict=True):
            block.adapter = adapter if step != 2 else None
        output = model(_batch(step, rank))
        if output.requires_grad:
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in parameters]  # type: ignore[attr-defined]


_STYLES = {
    "routed": functools.partial(_with_blocks, _Experts),
    "grouped": functools.partial(_with_blocks, _GroupedExperts),
    "context_parallel": functools.partial(_with_blocks, _SplitAttention),
    **{each.__name__.strip("_"): each for each in (_functional, _muon, _averaged, _adapters)},
}


@pytest.mark.parametrize("inner_backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", _STYLES)
@on_ranks(2)
def test_training_styles_match_eager(rank: int, name: str, inner_backend: str) -> None:
    def compiles(model: Any) -> None:
        model.compile(backend="compile_fsdp", options={"inner_backend": inner_backend})

    eager = _STYLES[name](torch_fully_shard, lambda model: None, rank)
    ours = _STYLES[name](compile_fsdp.fully_shard, compiles, rank)
    assert len(eager) == len(ours) > 0
    worst = max((one - other).abs().max().item() for one, other in zip(ours, eager, strict=True))
    assert worst <= (0 if inner_backend == "aot_eager" else 1e-5)
