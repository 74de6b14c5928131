"""Changing sizes and modes: right at every step, and compiled once for all sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from helpers.parity.check import Parity, build, compare, compare_grads, loss_of
from helpers.ranks.pools import run_ranks


def _train_on(
    rank: int,
    case: str,
    shapes: list[tuple[int, int]],
    mark: bool,
    dynamic: bool | None,
    inner_backend: str = "aot_eager",
) -> tuple[Parity, list[str]]:
    """Train a language model on token batches of several shapes; the graphs compiled for each."""
    eager, ours = build(case, torch_fully_shard), build(case, compile_fsdp.fully_shard)
    ours.model.compile(
        backend="compile_fsdp", fullgraph=True, dynamic=dynamic, options={"inner_backend": inner_backend}
    )
    result, compiled = Parity(), []
    for step, shape in enumerate(shapes):
        torch.manual_seed(100 * step + rank)
        tokens = torch.randint(0, 16, shape)
        before = len(compile_fsdp.reports())
        losses = []
        for each in (eager, ours):
            mine = tokens.clone()
            if mark and each is ours:
                torch._dynamo.mark_dynamic(mine, 0)
                torch._dynamo.mark_dynamic(mine, 1)
            loss = loss_of(each.model, {"tokens": mine})
            loss.backward()
            losses.append(loss.detach())
        compare(result, f"step {step}: loss", losses[1], losses[0])
        compare_grads(result, f"step {step}", ours.model, eager.model)
        for each in (eager, ours):
            each.model.zero_grad()
        compiled.append(" ".join(report.direction for report in compile_fsdp.reports()[before:]))
    return result, compiled


SHAPES = [(4, 6), (5, 6), (7, 9), (3, 11), (4, 6), (9, 4)]


@pytest.mark.slow
def test_marked_sizes_are_compiled_once() -> None:
    for result, compiled in run_ranks(2, _train_on, "embedded", SHAPES, True, None):
        assert result.differing == []
        assert compiled == ["forward backward", "", "", "", "", ""]


def test_dynamic_compiles_once() -> None:
    for result, compiled in run_ranks(2, _train_on, "embedded", SHAPES, False, True):
        assert result.differing == []
        assert compiled == ["forward backward", "", "", "", "", ""]


@pytest.mark.slow
def test_unmarked_sizes_are_compiled_when_they_change() -> None:
    for result, compiled in run_ranks(2, _train_on, "embedded", SHAPES, False, None):
        assert result.differing == []
        # Dynamo takes a size for a constant until it changes: the batch in step 1, the sequence in step 2.
        assert compiled == ["forward backward", "forward backward", "forward backward", "", "", ""]


# Both sizes change, and those of rank 1 are others.
LENGTHS = [(4, 6), (5, 7), (7, 9), (3, 11), (4, 6), (9, 4), (2, 5), (6, 8)]


def _train_on_own_lengths(rank: int, inner_backend: str) -> tuple[Parity, list[str]]:
    shapes = [(batch + rank, length + 2 * rank) for batch, length in LENGTHS]
    return _train_on(rank, "embedded", shapes, False, None, inner_backend)


def test_eight_lengths_are_compiled_twice() -> None:
    for result, compiled in run_ranks(2, _train_on_own_lengths, "aot_eager"):
        assert result.differing == []
        assert compiled == ["forward backward", "forward backward"] + [""] * 6


@pytest.mark.slow
def test_eight_lengths_with_the_passes() -> None:
    for result, compiled in run_ranks(2, _train_on_own_lengths, "inductor", timeout_s=280.0):
        assert result.worst <= 1e-5
        assert sum(len(each.split()) for each in compiled) <= 5


def _switch(rank: int) -> tuple[Parity, list[str]]:
    """Train and evaluate in turn a model whose batch norm behaves differently in each mode."""
    eager, ours = build("batch_norm", torch_fully_shard), build("batch_norm", compile_fsdp.fully_shard)
    ours.model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
    result, compiled = Parity(), []
    for step in range(6):
        torch.manual_seed(100 * step + rank)
        batch: dict[str, Any] = eager.batch()
        before = len(compile_fsdp.reports())
        losses = []
        for each in (eager, ours):
            each.model.train(step % 2 == 0)
            with torch.set_grad_enabled(step % 2 == 0):
                loss = loss_of(each.model, batch)
            if step % 2 == 0:
                loss.backward()
            losses.append(loss.detach())
        compare(result, f"step {step}: loss", losses[1], losses[0])
        compare_grads(result, f"step {step}", ours.model, eager.model)
        for mine, theirs in zip(ours.model.buffers(), eager.model.buffers(), strict=True):
            compare(result, f"step {step}: buffer", mine, theirs)
        compiled.append(" ".join(report.direction for report in compile_fsdp.reports()[before:]))
    return result, compiled


def test_train_and_eval_in_turn() -> None:
    for result, compiled in run_ranks(2, _switch):
        assert result.differing == []
        # The third finds the root unsharded, as an evaluation leaves it, and gathers it no more.
        assert compiled == ["forward backward", "forward", "forward backward", "", "", ""]
