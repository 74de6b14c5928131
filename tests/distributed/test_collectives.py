"""What a profile shows of a compiled step's collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from torch.profiler import ProfilerActivity, profile

from harness import device_type, run_ranks
from parity import loss_of
from recording import collectives_of
from twins import Twins


def _profile(run: Callable[[], object]) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    return Counter({each.key: each.count for each in profiled.key_averages()})


def _steps(rank: int, options: dict[str, object]) -> tuple[Counter[str], Counter[str]]:
    """What an eager and a compiled step call, and how often."""
    twins = Twins(rank, options=options)
    twins.train()
    batch = twins.batch()
    models = (twins.eager.model, twins.ours.model)
    eager, ours = (_profile(lambda model=model: loss_of(model, batch).backward()) for model in models)  # type: ignore[misc]
    return eager, ours


def _ranges(profiled: Counter[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for joined, count in profiled.items():
        for name in joined.split(", "):
            if name.partition(" ")[0] in ("FSDP::all_gather", "FSDP::post_backward_reduce"):
                found[name] += count
    return found


@pytest.mark.parametrize("inner_backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("budget", [None, 10**9])
def test_gathers_are_not_coalesced(inner_backend: str, budget: int | None) -> None:
    """gloo cannot run two coalesced gathers at a time (ops/named_collectives.py)."""
    if device_type() != "cpu":
        pytest.skip("gloo only")
    for _, ours in run_ranks(2, _steps, {"inner_backend": inner_backend, "memory_budget": budget}):
        assert [op for op in ours if op.startswith("c10d::") and "allgather" in op] == ["c10d::_allgather_base_"]


@pytest.mark.parametrize("inner_backend", ["aot_eager", "inductor"])
def test_ranges_are_named_as_in_eager_fsdp2(inner_backend: str) -> None:
    for eager, ours in run_ranks(2, _steps, {"inner_backend": inner_backend}):
        assert _ranges(ours) == _ranges(eager)


def test_a_gather_of_several_modules_names_them_all() -> None:
    options = {"memory_budget": 10**9}
    for eager, ours in run_ranks(2, _steps, options):
        assert set(_ranges(ours)) == set(_ranges(eager))
        assert any(", FSDP::" in name for name in ours)


def _gathers(rank: int, inner_backend: str) -> list[str]:
    twins = Twins(rank, "frozen_first", options={"inner_backend": inner_backend})
    twins.train()
    batch = twins.batch()
    found = collectives_of(lambda: loss_of(twins.ours.model, batch).backward())
    return [each.kind for each in found if each.kind == "all_gather"]


# The backward's hook gathers the trained layer, though no gradient needs it; a pass takes the gather out.
@pytest.mark.parametrize(("inner_backend", "of_backward"), [("aot_eager", 1), ("inductor", 0)])
def test_a_backward_gathers_no_frozen_layer_that_it_does_not_pass(inner_backend: str, of_backward: int) -> None:
    for gathers in run_ranks(2, _gathers, inner_backend):
        assert len(gathers) == 3 + of_backward  # of the forward: the root, the frozen and the trained layer
