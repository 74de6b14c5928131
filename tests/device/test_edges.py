"""Whatever orders a training step is needed: what is left out is found by the race detector, or made no difference.

Waits of streams for one another, recorded events, and the hold of collectives on memory, each in turn, by position.
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
    """After an error. Of torch's own models only those of 2.13 and later can do it themselves."""
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    else:
        reset_iter_state(fsdp_state(model))


def _leave_out_each(rank: int, is_compiled: bool, edge: str) -> list[tuple[str, bool]]:
    """For each edge of a step: what the detector says without it, "" if nothing; whether the results are the same."""
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


# By whether the step is compiled, and the kind of edge: whether the step needs any of it. Eager FSDP2 keeps its buffers
# itself until their collectives are over; compiled steps record no events.
NEEDED = {
    (False, "WAIT"): True,
    (False, "EVENT"): True,
    (False, "HOLD"): False,
    (True, "WAIT"): True,
    (True, "EVENT"): False,
    (True, "HOLD"): True,
}


QUICK = {(False, "WAIT"), (False, "EVENT"), (True, "WAIT"), (True, "HOLD")}


@pytest.mark.parametrize(
    ("is_compiled", "edge"),
    [pytest.param(*each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in NEEDED],
)
def test_an_edge_that_is_left_out_is_found_or_was_not_needed(is_compiled: bool, edge: str) -> None:
    first, second = run_ranks(2, _leave_out_each, is_compiled, edge, device="emulated", timeout_s=280)
    assert first == second  # it does not depend on what runs when
    found = [error for error, _ in first if error]
    assert all(each.startswith("race on ") for each in found)
    assert all(is_equal for error, is_equal in first if not error)
    assert bool(found) == NEEDED[is_compiled, edge]
    if edge == "WAIT":
        assert len(found) >= len(first) / 2
        assert any("layers.0." in each for each in found)
