"""Random programs train correctly within random memory budgets.

Gradients match a step without a budget, and peak memory stays within the budget. To draw new programs, change the seed:
`pytest -m slow --hypothesis-seed=N parity/test_budgeted_programs.py`.
"""

from __future__ import annotations

import gc
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import compile_fsdp
from compile_fsdp.errors import MemoryBudgetError
from compile_fsdp.tools.bench.measure import peak_bytes
from helpers.models.program_training import build, tensor_of
from helpers.models.random_programs import PROGRAMS, Part, Program, comparable, in_one_graph
from helpers.parity.check import full
from helpers.ranks.pools import run_ranks


class _WithLoss(nn.Module):
    """A program's model with its loss, so that one graph computes the whole forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        output = tensor_of(self.model(x, flag)).to(x.dtype)
        # No square: run op by op, its backward holds two more tensors of this size, which the budget does not count.
        return (output * torch.linspace(-1, 1, x.shape[1], dtype=x.dtype)).mean()


class _Step:
    """A program's training step; `budget` is in bytes, or None for no budget."""

    def __init__(self, program: Program, rank: int, budget: int | None) -> None:
        torch._dynamo.reset()
        self.model = _WithLoss(build(program, compile_fsdp.fully_shard))
        compile_fsdp.fully_shard(self.model)
        options = {"inner_backend": program.inner_backend, "memory_budget": budget, "progress": False}
        self.model.compile(backend="compile_fsdp", fullgraph=True, options=options)
        torch.manual_seed(rank)
        self._batch = torch.randn(program.rows, program.features, dtype=program.dtype)
        self._flag = torch.ones(())

    def grads(self) -> list[torch.Tensor | None]:
        """Return the gradients; none at all if the loss has none."""
        loss = self.model(self._batch, self._flag)
        if not loss.requires_grad:
            return []
        loss.backward()
        grads = [None if each.grad is None else full(each.grad).clone() for each in self.model.parameters()]
        self.model.zero_grad()
        return grads

    def peak(self) -> int:
        """Peak bytes of a step: the least of three runs, because gloo's threads may free sent buffers late."""

        def step() -> None:
            self.model(self._batch, self._flag).backward()
            self.model.zero_grad()

        step()
        gc.collect()
        return min(peak_bytes(step, self._batch.device) for _ in range(3))


def _train(rank: int, program: Program, percent: int) -> tuple[float, int, int] | None:
    """Return the largest relative gradient error, and the budget and the peak in bytes.

    The budget is `percent` of the smallest feasible budget. Returns None if the loss has no gradient.
    """
    expected = _Step(program, rank, None).grads()
    if not expected:
        return None
    with pytest.raises(MemoryBudgetError) as error:
        _Step(program, rank, 0).grads()
    found = re.search(r"at least (\d+) bytes", str(error.value))
    assert found is not None
    budget = int(found[1]) * percent // 100
    step, worst = _Step(program, rank, budget), 0.0
    for mine, theirs in zip(step.grads(), expected, strict=True):
        assert (mine is None) is (theirs is None)
        if mine is not None and theirs is not None:
            worst = max(worst, ((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item())
    return worst, budget, step.peak()


# Plain parts replace tensor subclasses, because the budget counts temporaries of torch's own ops only.
_PLAIN = {"int8": "linear", "dtensor": "again"}


def _plain(part: Part) -> Part:
    return replace(part, kind=_PLAIN.get(part.kind, part.kind), children=tuple(map(_plain, part.children)))


def _wide(program: Program, size: tuple[int, int]) -> Program:
    """A variant whose activations and parameters are so large that other memory is negligible."""
    rows, features = size
    return comparable(replace(program, root=_plain(in_one_graph(program.root)), rows=rows, features=features))


# (rows, features). KiB of an activation and of a matrix: 256 and 4, 64 and 256, 320 and 100.
SIZES = ((2048, 32), (64, 256), (512, 160))
WIDE = st.builds(_wide, PROGRAMS, st.sampled_from(SIZES))
PERCENT = st.integers(100, 170)

MLP = Part("mlp", number=7, is_sharded=True)
NAMED = {
    "blocks": Program(Part("chain", (MLP, Part("norm", is_sharded=True))), rows=2048, features=32),
    "a checkpoint around all": Program(
        Part("chain", (replace(MLP, number=4, times=2),), times=2, is_checkpointed=True), rows=2048, features=32
    ),
    "modules that checkpoints gather for": Program(
        Part("chain", (Part("chain", (MLP,), is_checkpointed=True),) * 2), rows=64, features=256
    ),
    "checkpoints in a checkpoint": Program(
        Part("chain", (replace(MLP, is_checkpointed=True),) * 5, is_checkpointed=True), rows=2048, features=32
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        "blocks",
        "a checkpoint around all",
        pytest.param("modules that checkpoints gather for", marks=pytest.mark.slow),
        pytest.param("checkpoints in a checkpoint", marks=pytest.mark.slow),
    ],
)
def test_named_program_trains_within_its_smallest_budget(name: str) -> None:
    assert _check(comparable(NAMED[name]), percent=100)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("inner_backend", "examples"), [("aot_eager", 50), ("inductor", 10)])
def test_random_programs_train_within_their_budget(inner_backend: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(WIDE, PERCENT)
    def check(program: Program, percent: int) -> None:
        assume(_check(comparable(replace(program, inner_backend=inner_backend)), percent))

    check()


def _check(program: Program, percent: int) -> bool:
    """Return whether the program trains any parameter; assert its gradients and peak memory."""
    for result in run_ranks(2, _train, program, percent, timeout_s=600.0):
        if result is None:
            return False
        worst, budget, peak = result
        assert worst <= program.tolerance
        assert peak <= budget
    return True
