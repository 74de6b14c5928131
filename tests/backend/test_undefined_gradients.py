"""Model outputs that the loss does not use leave gradients None, as in eager FSDP2."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.models.replays import compile_with_replay, count_replays
from helpers.parity.check import Parity, compare_grads
from helpers.parity.twins import AOT_EAGER, build_both
from helpers.ranks.recording import collectives_of
from helpers.ranks.tests import on_ranks


class _Heads(nn.Module):
    """A trunk and three heads; the third head takes the second head's output.

    `breaks`: the graph, behind the trunk. `splits`: the main head's output, into two views.
    """

    def __init__(self, breaks: bool = False, splits: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh())
        self.main, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.breaks = breaks
        self.splits = splits

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.trunk(x)
        if self.breaks:
            torch._dynamo.graph_break()
        second = x + self.second(x * self.scale)
        main = self.main(x)
        if self.splits:
            return main[:, :3], second.detach(), second, self.third(second).sum(), main[:, 3:]
        return main, second.detach(), second, self.third(second).sum()


_LOSSES: dict[str, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {
    "main": lambda outputs: outputs[0].square().mean(),
    "second": lambda outputs: outputs[2].square().mean(),
    "third": lambda outputs: outputs[3],
    "all": lambda outputs: outputs[0].square().mean() + outputs[2].square().mean() + outputs[3],
}


def _build(fully_shard: Any, **variant: bool) -> Any:
    return shard_blocks(_Heads(**variant), fully_shard)


def _train(model: Any, losses: Sequence[str]) -> tuple[list[list[bool]], list[int], list[torch.Tensor]]:
    """Return parameters with gradients and the number of collectives by step, and the final parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    have, collectives = [], []
    for step, loss in enumerate(losses):
        torch.manual_seed(step)
        outputs = model(torch.randn(3, 4))
        collectives.append(len(collectives_of(_LOSSES[loss](outputs).backward)))
        have.append([parameter.grad is not None for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return have, collectives, [parameter.full_tensor().detach() for parameter in model.parameters()]


def _as_eager(options: dict[str, Any], variant: dict[str, bool]) -> tuple[list[int], list[int], Counter[str]]:
    """Train compiled as with eager FSDP2: with equal parameters, and gradients of equal parameters.

    Returns collective counts of the backwards (eager, compiled) and the number of compiled graphs by direction.
    """
    models = build_both(lambda shard: _build(shard, **variant), fullgraph="breaks" not in variant, options=options)
    compile_fsdp.reset_reports()
    losses = ("main", "all", "second", "main", "third", "second", "all")
    (expected_have, theirs, expected), (have, mine, found) = (_train(model, losses) for model in models)
    close = torch.equal if options["inner_backend"] == "aot_eager" else partial(torch.allclose, atol=1e-6)
    assert have == expected_have
    assert all(map(close, found, expected)) and len(found) == len(expected)
    return theirs, mine, Counter(report.direction for report in compile_fsdp.reports())


@pytest.mark.parametrize("variant", [{}, {"splits": True}])
@pytest.mark.parametrize("inner_backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on_ranks(2)
def test_unused_outputs_leave_gradients_none_as_in_eager(
    rank: int, inner_backend: str, variant: dict[str, bool]
) -> None:
    eager, ours, graphs = _as_eager({"inner_backend": inner_backend}, variant)
    assert graphs == {"forward": 1, "backward": 4}
    # No gathers for outputs that the loss does not use. Eager code gathers once more for outputs that are views;
    # on the way through Inductor, small groups share collectives.
    is_equal = inner_backend == "aot_eager" and not variant
    assert ours == eager if is_equal else all(map(operator.le, ours, eager))


@on_ranks(2)
def test_unused_outputs_leave_gradients_none_with_a_graph_break(rank: int) -> None:
    *_, graphs = _as_eager(AOT_EAGER, {"breaks": True})
    assert graphs == {"forward": 3, "backward": 5}


@on_ranks(2, since="2.13")
def test_backward_is_replayed_only_if_the_loss_uses_the_recorded_outputs(rank: int) -> None:
    eager, replaying = build_both(_build)
    compile_with_replay(replaying, backend="compile_fsdp", fullgraph=True, options=AOT_EAGER)
    losses = ("second", "main", "second", "third", "second")  # the first two use outputs of equal shape
    (expected_have, _, expected), (have, _, found) = (_train(model, losses) for model in (eager, replaying))
    assert count_replays(replaying) == (4, 2)
    assert have == expected_have and all(map(torch.equal, found, expected))


class _Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * weights.detach()).square().mean()


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("function", [False, True], ids=["detached in the next graph", "a function returns None"])
@on_ranks(2)
def test_graph_without_any_gradient_of_its_outputs_is_passed_over(rank: int, function: bool) -> None:
    """A model reads the output of a second one without a gradient."""
    grads = []
    for fully_shard in (torch_fully_shard, compile_fsdp.fully_shard):
        torch.manual_seed(0)
        weights, model = fully_shard(nn.Linear(4, 4)), fully_shard(_Weighted())
        if fully_shard is compile_fsdp.fully_shard:
            for each in (weights, model):
                compile_whole(each, **AOT_EAGER)
        torch.manual_seed(rank)
        for _ in range(2):
            x = torch.randn(3, 4)
            given = _NoGradient.apply(weights(x)) if function else weights(x)
            model(x, given).backward()
        grads.append([each.grad.full_tensor() for each in model.parameters()])
        assert all(each.grad is None for each in weights.parameters())
    assert all(map(torch.equal, *grads))


@on_ranks(2, since="2.13")  # 2.11 loses items that a hook appends to a list
def test_gradient_hooks_run_as_in_eager(rank: int) -> None:
    records: tuple[list[str], list[str]] = [], []
    for model, called in zip(build_both(_build), records, strict=True):

        def watch(module: nn.Module, args: Any, output: torch.Tensor, called: list[str] = called) -> None:
            def note(grad: torch.Tensor) -> None:
                called.append(f"gradient of {tuple(grad.shape)} of {type(module).__name__}")

            output.register_hook(note)

        model.second.register_forward_hook(watch)
        model.trunk.register_forward_hook(watch)
        _train(model, ("main", "second", "main"))
    eager, ours = records
    assert len(eager) == 4
    assert ours == eager


class _SkippingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, whole: bool = True) -> torch.Tensor:
        x = self.first(x).tanh()
        return x + self.second(x) if whole else x


class _Skipping(nn.Module):
    """Its middle block skips a layer if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_SkippingBlock() for _ in range(3))

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        first, second, third = self.blocks
        return third(second(first(x), whole)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("order", [("all", "none", "one rank"), ("one rank", "all", "none")])
@on_ranks(2, since="2.13")
def test_ranks_may_skip_different_layers_if_zeros_are_reduced(rank: int, order: tuple[str, ...]) -> None:
    eager, ours = build_both(lambda fully_shard: shard_blocks(_Skipping(), fully_shard))
    for model in (eager, ours):
        model.set_reduce_scatter_unused_params(True)
    result = Parity()
    for who in order:
        torch.manual_seed(rank)
        x = torch.randn(3, 4)
        for model in (eager, ours):
            model.zero_grad()
            model(x, who == "all" or (who == "one rank" and rank == 0)).backward()
        compare_grads(result, who, ours, eager)
    assert result.differing == []
