"""Missing synchronizations raise race errors or change no result.

Leaves out each stream wait, event record, and memory hold of a collective in turn, by position.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from compile_fsdp.runtime.reset import reset_iter_state
from compile_fsdp.torch_compat.fsdp import fsdp_state
from helpers.device.install import install, name_parameters
from helpers.parity.check import build, loss_of
from helpers.ranks.pools import run_ranks


def _reset(model: Any) -> None:
    """Reset FSDP2's state after an error, also before torch 2.13."""
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    else:
        reset_iter_state(fsdp_state(model))


def _leave_out_each(rank: int, is_compiled: bool, edge: str) -> list[tuple[str, bool]]:
    """Race error, or "", and equality of results without each edge of a step."""
    case = build("mlp", compile_fsdp.fully_shard if is_compiled else torch_fully_shard)
    model = case.model
    if is_compiled:
        model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
    torch.manual_seed(rank)
    batch = case.batch()

    def step() -> list[torch.Tensor]:
        loss = loss_of(model, batch)
        loss.backward()
        grads = [each.grad.to_local().clone() for each in model.parameters() if each.grad is not None]
        torch.emulated.synchronize()
        model.zero_grad()
        return [loss.detach(), *grads]

    extension = install()
    kind = getattr(extension.Edge, edge)
    for _ in range(3):
        expected = step()
    name_parameters(model)
    extension.leave_out(kind, -1)
    step()
    outcomes = []
    for number in range(extension.edges_since_then(kind)):
        extension.leave_out(kind, number)
        try:
            results = step()
            error = ""
        except RuntimeError as raised:
            results = []
            error = str(raised).partition("\n")[0]
        extension.leave_out(kind, -1)
        torch.emulated.synchronize()
        if error:
            _reset(model)
            model.zero_grad()
            torch.emulated.synchronize()
            step()
        outcomes.append((error, bool(results) and all(map(torch.equal, results, expected))))
    return outcomes


# Eager FSDP2 itself keeps its buffers until their collectives end. Compiled steps record no events.
@pytest.mark.parametrize(
    ("is_compiled", "edge", "is_needed"),
    [
        (False, "WAIT", True),
        (False, "EVENT", True),
        pytest.param(False, "HOLD", False, marks=pytest.mark.slow),
        (True, "WAIT", True),
        (True, "HOLD", True),
    ],
)
def test_missing_synchronization_is_reported_or_changes_no_result(
    is_compiled: bool, edge: str, is_needed: bool
) -> None:
    first, second = run_ranks(2, _leave_out_each, is_compiled, edge, device="emulated")
    assert first == second  # independent of timing
    found = [error for error, _ in first if error]
    assert all(each.startswith("race on ") for each in found)
    assert all(is_equal for error, is_equal in first if not error)
    assert first
    assert bool(found) is is_needed
    if edge == "WAIT":
        assert len(found) >= len(first) / 2
        assert any("layers.0." in each for each in found)
