"""gloo cannot run two coalesced gathers at a time (ops/all_gather.py), so a compiled step issues none."""

from __future__ import annotations

import pytest

from harness import device_type, run_ranks
from parity import loss_of
from twins import Twins


def _gather_ops(rank: int, options: dict[str, object]) -> dict[str, int]:
    """How often a compiled step calls each of the process group's gathers."""
    from torch.profiler import ProfilerActivity, profile

    twins = Twins(rank, options=options)
    twins.train()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        loss_of(twins.ours.model, twins.batch()).backward()
    counts = {each.key: each.count for each in profiled.key_averages()}
    return {op: count for op, count in counts.items() if op.startswith("c10d::") and "allgather" in op}


@pytest.mark.parametrize("inner_backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("budget", [None, 10**9])
def test_gathers_are_not_coalesced(inner_backend: str, budget: int | None) -> None:
    if device_type() != "cpu":
        pytest.skip("gloo only")
    for ops in run_ranks(2, _gather_ops, {"inner_backend": inner_backend, "memory_budget": budget}):
        assert list(ops) == ["c10d::_allgather_base_"]
