"""A model's equal blocks are compiled once, and train as eager FSDP2 trains them."""

from __future__ import annotations

import gc
import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.metrics
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import compile_fsdp
from compile_fsdp.ops.call_block import _parts
from compile_fsdp.passes.analysis.costs import Costs
from helpers.graphs.capture import render_step, without_graph_caches
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.models.stacks import Block, Stack
from helpers.parity.check import Parity, compare, compare_grads
from helpers.parity.twins import AOT_EAGER, build_both
from helpers.ranks.fake_world import fake_world
from helpers.ranks.pools import run_ranks

LAYERS = 3


class _Draws(nn.Module):
    """A block with dropout, also of its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.linear(x)).view(1, 1, -1, 8)
        hidden = F.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=0.5)
        return self.dropout(hidden.sin()).view(-1, 8)


class _Checkpointed(nn.Module):
    """Attention without dropout in a checkpoint, which is part of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(checkpoint(self._attend, x, use_reentrant=False))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.linear(x)).view(1, 1, -1, 8)
        return F.scaled_dot_product_attention(hidden, hidden, hidden).view(-1, 8).exp()


class _Attends(nn.Module):
    """Attention with two heads, op by op; its backward reads the length, and products of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.linear(x).unflatten(-1, (2, 4)).transpose(0, 1)
        found = torch.bmm(torch.bmm(heads, heads.transpose(1, 2)).softmax(-1), heads)
        return x + found.transpose(0, 1).reshape(-1, 8)


class _DrawsAgain(_Draws):
    """Dropout in a checkpoint, which draws the same numbers again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(super().forward, x, use_reentrant=False)


class _Called(Block):
    """A layer whose call is a checkpoint, which has its hooks in the body."""

    def __init__(self) -> None:
        super().__init__(8)

    def __call__(self, *args: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=False)


class _Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * F.silu(condition)


class _Conditioned(Stack):
    """Its blocks read one tensor, whose gradients are added up over the blocks."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Modulated() for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = condition = self.inp(x)
        x = torch.exp(x)
        for layer in self.layers:
            x = layer(x, condition)
        return self.out(x).square().mean()


class _Projected(nn.Module):
    """Reads its input three times, which autocast casts three times."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.q(x) * self.k(x)).sin() * self.v(x)


class _Cast(Stack):
    """Runs its blocks under autocast, and the last of them in float32."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.inp(x)
            for layer in self.layers[:-2]:
                x = layer(x)
            with torch.autocast("cpu", enabled=False):
                for layer in self.layers[-2:]:
                    x = layer(x.float())
            return self.out(x).float().square().mean()


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (each.reshape(1, 2, -1, 4) for each in self.linear(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(query, key, value).sin().reshape(-1, 8))


class _Chosen(Stack):
    """Chooses the backend of attention for each block, and none for the last two."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = self.inp(x)
        for i, layer in enumerate(self.layers[:-2]):
            with sdpa_kernel(SDPBackend.MATH if i % 2 else SDPBackend.FLASH_ATTENTION):
                x = layer(x)
        for layer in self.layers[-2:]:
            x = layer(x)
        return self.out(x).square().mean()


class _Scaled(nn.Module):
    """Equal to no block of another test, whose model may still be alive."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)).sin().exp() * self.scale


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)
        self.last = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(torch.tanh(self.last(x)))))


class _Twice(Stack):
    """Runs a block twice on the same input, and returns the difference."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        first = F.dropout(x.sin().cos().exp().tanh().exp(), 0.5)
        with torch.no_grad():
            least = x.min()
        second = F.dropout(x.sin().cos().exp().tanh().exp(), 0.5)
        return (first - second).square().sum() + 0 * self.out(x).sum() * least


class _Compared(nn.Module):
    """Runs a module with dropout twice on equal inputs, and returns the difference."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.block = nn.Linear(8, 8), _Draws()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        return (self.block(x) - self.block(x)).square().sum()


class _Views(nn.Module):
    """Returns views of a result that its backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.linear(x)).sin().exp()
        return hidden.view(-1, 2, 4).view(-1, 8)


def _shard(
    fully_shard: Any, layers: int = LAYERS, frozen: int = 0, kind: type[Stack] = Stack, block: Any = None, **policy: Any
) -> Any:
    model: Any = kind(layers=layers)
    if block is not None:
        model.layers = nn.ModuleList(block() for _ in range(layers))
    for layer in model.layers[:frozen]:
        layer.requires_grad_(False)
    arguments = {"mp_policy": MixedPrecisionPolicy(**policy)} if policy else {}
    return shard_blocks(model, fully_shard, **arguments)


# Arguments of `_shard`; by name, because ranks cannot import a test's classes.
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen": {"frozen": 2, "layers": 4},
    "views": {"block": _Views},
    "mlp": {"block": _Mlp},
    "dropout": {"block": _Draws},
    "checkpointed": {"block": _Checkpointed},
    "attention": {"block": _Attends},
    "chosen attention": {"kind": _Chosen, "block": _Attention, "layers": 4},
    "dropout in a checkpoint": {"block": _DrawsAgain},
    "called in a checkpoint": {"block": _Called},
    "frozen, called in a checkpoint": {"block": _Called, "frozen": 2, "layers": 4},
    "cast, called in a checkpoint": {"block": _Called, "param_dtype": torch.bfloat16},
    "one condition": {"kind": _Conditioned},
    "autocast": {"kind": _Cast, "block": _Projected, "layers": 4},
    "autocast, in checkpoints": {"kind": _Cast, "block": _Checkpointed, "layers": 4},
    "autocast around the model": {"kind": _Cast, "block": _Projected, "layers": 4},
    "mixed precision": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
}


def _run(model: nn.Module, x: torch.Tensor, name: str) -> Any:
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16) if "around the model" in name else nullcontext():
        return model(x)


def _train(rank: int, lengths: list[list[int]], name: str, options: dict[str, Any]) -> Parity:
    """Take a step for each list of batch lengths, one of each rank, and evaluate after each step."""
    eager, ours = build_both(lambda fully_shard: _shard(fully_shard, **MODELS[name]), **options)
    result = Parity()
    for step, by_rank in enumerate(lengths):
        torch.manual_seed(10 * step + rank)
        for micro, x in enumerate(torch.randn(2, by_rank[rank], 8)):
            losses = [_run(model, x, name) for model in (ours, eager)]
            for loss in losses:
                loss.backward()
            compare(result, f"step {step}.{micro}: loss", *losses)
        compare_grads(result, f"step {step}", ours, eager)
        with torch.no_grad():
            compare(result, f"step {step}: evaluation", _run(ours, x, name), _run(eager, x, name))
            for model in (ours, eager):
                model.reshard()  # else the next step compiles again
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
    return result


# Combinations of features that other models have one by one.
_SLOW = {"frozen, called in a checkpoint", "cast, called in a checkpoint", "autocast, in checkpoints"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in _SLOW else []) for name in MODELS]
)
def test_steps_are_bitwise_those_of_eager_fsdp2(name: str) -> None:
    for result in run_ranks(2, _train, [[4, 4], [4, 4]], name, {}):
        assert result.differing == []


LENGTHS = [[4, 4], [4, 6], [5, 7], [5, 4]]  # one rank compiles for changing sizes while its peer does not


@pytest.mark.parametrize(
    "name",
    [
        "attention",
        pytest.param("plain", marks=pytest.mark.slow),
        pytest.param("dropout in a checkpoint", marks=pytest.mark.slow),
    ],
)
def test_ranks_may_have_batches_of_different_lengths(name: str) -> None:
    for result in run_ranks(2, _train, LENGTHS, name, {}):
        assert result.differing == []


def test_batches_of_different_lengths_train_with_inductor() -> None:
    for result in run_ranks(2, _train, LENGTHS, "attention", {"options": {}}):
        assert result.worst < 1e-5


@pytest.mark.parametrize("name", ["dropout", "dropout in a checkpoint"])
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id=""), pytest.param({"verify": True}, id="verified", marks=pytest.mark.slow)],
)
def test_inductor_draws_the_numbers_of_eager_fsdp2_on_cpus(name: str, options: dict[str, Any]) -> None:
    for result in run_ranks(2, _train, [[4, 4]], name, {"options": options}):
        assert result.worst < 1e-5


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id=""),
        pytest.param({"block": _Called}, id="called in a checkpoint", marks=pytest.mark.slow),
        pytest.param({"kind": _Cast}, id="autocast", marks=pytest.mark.slow),
    ],
)
def test_further_equal_blocks_need_no_further_kernels(arguments: dict[str, Any]) -> None:
    kernels = []
    for layers in (4, 6):
        with fake_world(2), without_graph_caches():
            torch._inductor.metrics.reset()
            model = compile_whole(_shard(compile_fsdp.fully_shard, layers, **arguments), bundle=False)
            model(torch.randn(4, 8)).backward()
            kernels.append(torch._inductor.metrics.generated_kernel_count)
    assert 0 < kernels[1] <= kernels[0]


def test_next_gather_starts_between_the_parts_of_a_backward() -> None:
    # No two groups, of 896 bytes a rank, share a collective.
    slow_compute = Costs(latency=1e-6, comm_bandwidth=1e9, memory_bandwidth=1e12, flops=1e6)
    with fake_world(2):
        model = _shard(compile_fsdp.fully_shard, block=_Mlp)
        graphs = render_step(model, lambda: model(torch.randn(4, 8)), bundle=False, costs=slow_compute)
    kinds = re.findall(r"= (call_block|all_gather_into_tensor|reduce_scatter_tensor)\(", graphs[-1])
    first = kinds.index("call_block")
    block = ["call_block", "all_gather_into_tensor", "call_block", "reduce_scatter_tensor"]
    assert kinds[first : first + len(block)] == block


def test_model_without_autocast_does_not_call_the_blocks_under_autocast() -> None:
    x, before = torch.randn(4, 8), {*_parts}
    with fake_world(2), torch.no_grad():
        model = compile_whole(_shard(compile_fsdp.fully_shard), **AOT_EAGER)
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
        under_autocast = {*_parts} - before
        assert len(under_autocast) == 1
        model(x)
    assert len({*_parts} - before - under_autocast) == 1


def test_blocks_with_symbolic_sizes_are_compiled_for_each_graph() -> None:
    """Sizes of a batch are guarded by the graph whose guards a block's sizes have added, and by no other graph."""
    before = {*_parts}
    with fake_world(2), torch.no_grad():
        models = [_shard(compile_fsdp.fully_shard) for _ in range(2)]
        for model, batch_size in zip(models, (4, 6), strict=True):
            model.compile(backend="compile_fsdp", fullgraph=True, dynamic=True, options=AOT_EAGER)
            model(torch.randn(batch_size, 8))
    first, second = sorted({*_parts} - before)
    assert second == f"{first}_1"


def test_equal_calls_of_random_blocks_draw_different_numbers() -> None:
    with fake_world(2):
        for source in (_Twice(), _Compared()):
            model = compile_whole(shard_blocks(source, reshard_after_forward=False), **AOT_EAGER)
            assert model(torch.randn(3, 8)) > 0


@pytest.mark.parametrize(
    ("arguments", "is_random"),
    [
        ({"block": partial(_Scaled, 3.0)}, False),
        ({"block": _Views}, False),
        ({"kind": _Conditioned}, False),
        ({"block": _Checkpointed}, False),
        ({"block": _Draws}, True),
        ({"block": _DrawsAgain}, True),
    ],
    ids=["plain", "views", "one condition", "checkpointed", "dropout", "dropout in a checkpoint"],
)
def test_blocks_vanish_with_the_model_that_calls_them(arguments: dict[str, Any], is_random: bool) -> None:
    before = {*_parts}
    with fake_world(2):
        model = compile_whole(_shard(compile_fsdp.fully_shard, **arguments), **AOT_EAGER)
        model(torch.randn(3, 8)).backward()
        names = {*_parts} - before
        halves = [name for name in sorted(names) if "draw" not in name]
        assert [_parts[name].is_random for name in halves] == [is_random, False]  # forward and backward
        del model
        torch._dynamo.reset()
        gc.collect()
    assert names.isdisjoint(_parts)
