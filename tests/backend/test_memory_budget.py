"""A large memory budget saves gathers, a small budget recomputes, and gradients stay equal."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from compile_fsdp.backend.memory_budget import _need
from compile_fsdp.errors import MemoryBudgetError
from compile_fsdp.passes.dynamo.fit_memory_budget import BudgetDecision
from compile_fsdp.reports import reports, reset_reports
from compile_fsdp.tools.bench.measure import peak_bytes
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.models.layers import Wide
from helpers.parity.check import full, loss_of
from helpers.parity.twins import Twins
from helpers.ranks.pools import run_ranks
from helpers.ranks.recording import gathers_of
from helpers.ranks.tests import on_ranks

PLENTY = 10**9
TIGHT = 13_500


# Two blocks and the root, which `pack_gathers` packs with Inductor. A tight budget gathers the blocks twice.
# test_step_collectives.py also tests packed gathers.
@pytest.mark.parametrize(
    ("inner_backend", "budget", "expected_gathers"),
    [
        ("aot_eager", PLENTY, 3),
        ("aot_eager", TIGHT, 5),
        pytest.param("inductor", PLENTY, 1, marks=pytest.mark.slow),
        pytest.param("inductor", TIGHT, 5, marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_budget_sets_the_number_of_gathers(rank: int, inner_backend: str, budget: int, expected_gathers: int) -> None:
    twins = Twins(rank, options={"inner_backend": inner_backend, "memory_budget": budget})
    twins.train()
    twins.train()
    gathers = gathers_of(lambda: loss_of(twins.ours.model, twins.batch()).backward())
    twins.ours.model.zero_grad()
    twins.evaluate(torch.no_grad)  # gathers and frees the parameters that a forward keeps
    loss_of(twins.ours.model, twins.batch())  # without a backward
    twins.train()
    with torch.compiler.set_stance("force_eager"):
        twins.train()
    twins.train()
    assert twins.result.differing == [] if inner_backend == "aot_eager" else twins.result.worst < 2e-6
    assert gathers == expected_gathers


def _build(budget: int | str | None, inner_backend: str) -> Any:
    torch.manual_seed(0)
    model = Wide(blocks=3)
    for block in model.blocks:
        block.insert(0, nn.Linear(32, 32))  # so that the block has enough ops to be worth a call
    shard_blocks(model)
    return compile_whole(model, inner_backend=inner_backend, memory_budget=budget, progress=False)


def _smallest(batch: torch.Tensor, inner_backend: str) -> int:
    """Return the smallest feasible budget, read from the error message."""
    model = _build(0, inner_backend)
    with pytest.raises(MemoryBudgetError, match=r"expected a memory_budget of at least \d+ bytes") as error:
        model(batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.compile(backend="compile_fsdp", options={"inner_backend": "aot_eager", "progress": False})
    model(batch).backward()  # the model stays usable
    found = re.search(r"at least (\d+) bytes", str(error.value))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("inner_backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on_ranks(2)
def test_step_stays_within_its_budget_with_equal_gradients(rank: int, inner_backend: str) -> None:
    torch.manual_seed(1)
    batch = torch.randn(2048, 32)
    smallest = _smallest(batch, inner_backend)
    found = []
    for budget in (smallest, smallest * 3 // 2, PLENTY, None):
        torch._dynamo.reset()
        model = _build(budget, inner_backend)

        def step(model: nn.Module = model) -> None:
            model(batch).backward()

        reset_reports()
        step()
        calls_blocks = any(report.decision is not None and report.decision.calls_blocks for report in reports())
        grads = [full(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]

        def again(model: nn.Module = model) -> None:
            model.zero_grad()
            model(batch).backward()
            model.zero_grad()

        again()
        found.append((budget or 0, peak_bytes(again, batch.device), grads, calls_blocks))
    *with_budgets, (_, _, expected, _) = found
    assert {calls_blocks for *_, calls_blocks in with_budgets} == {False, True}
    for budget, peak, grads, _ in with_budgets:
        assert peak <= budget
        torch.testing.assert_close(grads, expected, rtol=1e-6, atol=1e-8)
        assert inner_backend == "inductor" or all(map(torch.equal, grads, expected))
    peaks = [peak for _, peak, *_ in with_budgets]
    assert peaks[0] < 0.8 * peaks[-1]


def _with_other_batches(rank: int) -> list[BudgetDecision]:
    """Return a rank's budget decisions. Batch sizes differ by rank, and only rank 0 recompiles."""
    torch.manual_seed(1)
    batch = torch.randn(512 if rank else 128, 32)
    model = _build(1_300_000, "aot_eager")
    reset_reports()
    for each in (batch, torch.randn(256, 32) if rank == 0 else batch, batch):
        model(each).backward()
    return [report.decision for report in reports() if report.decision is not None]


def test_ranks_with_different_batch_sizes_make_equal_budget_decisions() -> None:
    (first, alone), (second,) = run_ranks(2, _with_other_batches)
    assert first == second
    assert first.recomputed
    assert alone.kept == first.kept
    assert alone.calls_blocks is first.calls_blocks


@pytest.mark.parametrize("calls_blocks", [False, True])
def test_rank_with_the_larger_step_decides_whether_or_not_it_calls_blocks(calls_blocks: bool) -> None:
    def possible(fastest_bytes: int, *order: bool) -> list[BudgetDecision]:
        plain = BudgetDecision((), (), False, 4, fastest_bytes, 100, 0.0, True, budget=100)
        return [replace(plain, fastest_bytes=fastest_bytes + 50 * each, calls_blocks=each) for each in order]

    larger, smaller = possible(120, calls_blocks, not calls_blocks), possible(110, not calls_blocks, calls_blocks)
    assert _need(larger) == 20
    assert _need(smaller) == 10
    unfit = [replace(each, fits=False) for each in possible(90, False, True)]
    assert _need(unfit) > _need(larger)


@on_ranks(4)
def test_kept_parameters_that_reshard_to_part_of_the_ranks_train(rank: int) -> None:
    model, plain = (
        shard_blocks(Wide(2, 8), fully_shard, reshard_after_forward=2)
        for fully_shard in (compile_fsdp.fully_shard, torch_fully_shard)
    )
    plain.load_state_dict(model.state_dict())
    compile_whole(model, inner_backend="aot_eager", memory_budget=10**9)
    own = dict(model.named_parameters())
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(4, 8)
        norms = []
        for each in (model, plain):
            each(x).backward()
            norms.append(full(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)))
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
            each.zero_grad()
        assert torch.equal(*norms) and norms[0] > 0
        assert all(parameter is own[fqn] for fqn, parameter in model.named_parameters())
