"""Correct steps and few recompilations if sizes or train/eval modes change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import compile_fsdp
from helpers.parity.check import Parity, compare, compare_grads
from helpers.parity.twins import Twins, build_both
from helpers.ranks.tests import on_ranks


def _train_on(
    rank: int, shapes: list[tuple[int, int]], mark: bool, dynamic: bool | None, inner_backend: str = "aot_eager"
) -> tuple[Parity, list[str]]:
    """Train on token batches of several shapes; return the parity and the graphs compiled in each step."""
    twins = Twins(rank, "embedded", 0.0, dynamic=dynamic, options={"inner_backend": inner_backend})
    remaining, compiled = iter(shapes), []

    def batch() -> dict[str, Any]:
        tokens = torch.randint(0, 16, next(remaining))
        if mark:
            torch._dynamo.mark_dynamic(tokens, [0, 1])
        return {"tokens": tokens}

    twins.eager.batch = batch  # type: ignore[method-assign]
    for _ in shapes:
        before = len(compile_fsdp.reports())
        twins.train()
        compiled.append(" ".join(report.direction for report in compile_fsdp.reports()[before:]))
    return twins.result, compiled


SHAPES = [(4, 6), (5, 6), (7, 9), (3, 11), (4, 6), (9, 4)]


@pytest.mark.parametrize(("mark", "dynamic"), [(False, True), pytest.param(True, None, marks=pytest.mark.slow)])
@on_ranks(2)
def test_dynamic_sizes_compile_once(rank: int, mark: bool, dynamic: bool | None) -> None:
    result, compiled = _train_on(rank, SHAPES, mark, dynamic)
    assert result.differing == []
    assert compiled == ["forward backward", "", "", "", "", ""]


# (batch size, length) of rank 0; rank 1 adds (1, 2).
LENGTHS = [(4, 6), (5, 7), (7, 9), (3, 11), (4, 6), (9, 4), (2, 5), (6, 8)]


def _train_on_own_lengths(rank: int, inner_backend: str) -> tuple[Parity, list[str]]:
    shapes = [(batch + rank, length + 2 * rank) for batch, length in LENGTHS]
    return _train_on(rank, shapes, False, None, inner_backend)


@on_ranks(2)
def test_eight_shapes_compile_twice(rank: int) -> None:
    result, compiled = _train_on_own_lengths(rank, "aot_eager")
    assert result.differing == []
    assert compiled == ["forward backward", "forward backward"] + [""] * 6


@pytest.mark.slow
@on_ranks(2)
def test_eight_shapes_match_eager_with_inductor(rank: int) -> None:
    result, compiled = _train_on_own_lengths(rank, "inductor")
    assert result.worst <= 1e-5
    assert sum(len(each.split()) for each in compiled) <= 5


@on_ranks(2)
def test_alternating_train_and_eval_stops_compiling_after_three_steps(rank: int) -> None:
    """The model has batch norm, which differs between the modes."""
    twins, compiled = Twins(rank, "batch_norm"), []
    models = twins.ours.model, twins.eager.model
    for step in range(6):
        before = len(compile_fsdp.reports())
        for model in models:
            model.train(step % 2 == 0)
        if step % 2 == 0:
            twins.train(update=False)
        else:
            twins.evaluate(torch.no_grad)
        compare_grads(twins.result, f"step {step}", *models)
        for mine, theirs in zip(*(model.buffers() for model in models), strict=True):
            compare(twins.result, f"step {step}: buffer", mine, theirs)
        compiled.append(" ".join(report.direction for report in compile_fsdp.reports()[before:]))
    assert twins.result.differing == []
    # Step 2 recompiles, because evaluation leaves the root unsharded and its gather is not needed.
    assert compiled == ["forward backward", "forward", "forward backward", "", "", ""]


class _Skips(nn.Module):
    """Skips layers by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.skipped: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i not in self.skipped and (i, i) not in self.skipped:
                x = layer(x).tanh()
        return x


@on_ranks(2)
def test_numbers_in_a_list_that_changed_are_found_in_it(rank: int) -> None:
    # Dynamo finds no constant in a list of symbols, and makes numbers symbols when they have changed.
    eager, ours = build_both(lambda fully_shard: fully_shard(_Skips()))
    for skipped in ([0], [1], [2, 0], [(0, 0)], [(1, 1)]):
        torch.manual_seed(rank)
        x = torch.randn(2, 4)
        for model in (eager, ours):
            model.skipped = skipped
        assert torch.equal(ours(x), eager(x)), skipped
