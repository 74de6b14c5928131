"""Collectives of a compiled step, as the profiler records them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from helpers.parity.check import loss_of
from helpers.parity.twins import Twins
from helpers.ranks.pools import device_type, run_ranks
from helpers.ranks.recording import gathers_of


def _profile(run: Callable[[], object]) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    return Counter({each.key: each.count for each in profiled.key_averages()})


def _steps(rank: int, options: dict[str, object]) -> tuple[Counter[str], Counter[str]]:
    """Call counts by event name of an eager and a compiled step."""
    twins = Twins(rank, options=options)
    twins.train()
    batch = twins.batch()
    models = (twins.eager.model, twins.ours.model)
    eager, ours = (_profile(lambda model=model: loss_of(model, batch).backward()) for model in models)  # type: ignore[misc]
    return eager, ours


# Cached, because several tests read these profiles.
@functools.cache
def _profiles(inner_backend: str, ranks: int, budget: int | None) -> list[Any]:
    """Results of `_steps` by rank."""
    return run_ranks(ranks, _steps, {"inner_backend": inner_backend, "memory_budget": budget})


def _ranges(profiled: Counter[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for joined, count in profiled.items():
        for name in joined.split(", "):
            if name.partition(" ")[0] in ("FSDP::all_gather", "FSDP::post_backward_reduce"):
                found[name] += count
    return found


# With Inductor, `make test` runs only the case with packed gathers.
@pytest.mark.parametrize(
    ("inner_backend", "ranks", "budget"),
    [("aot_eager", 2, None), ("aot_eager", 4, None), ("inductor", 2, 10**9)]
    + [pytest.param("inductor", ranks, None, marks=pytest.mark.slow) for ranks in (2, 4)],
)
def test_gathers_are_not_coalesced(inner_backend: str, ranks: int, budget: int | None) -> None:
    """See [Note: Two gathers at a time end the process]. With two ranks, each gather is an all-to-all."""
    if device_type() != "cpu":
        pytest.skip("gloo only")
    for _, ours in _profiles(inner_backend, ranks, budget):
        collectives = [op for op in ours if op.startswith("c10d::") and ("allgather" in op or "alltoall" in op)]
        assert collectives == ["c10d::alltoall_base_" if ranks == 2 else "c10d::_allgather_base_"]


@pytest.mark.parametrize("inner_backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_profiler_ranges_match_eager_fsdp2(inner_backend: str) -> None:
    for eager, ours in _profiles(inner_backend, 2, None):
        assert _ranges(ours) == _ranges(eager)


def test_packed_gather_range_names_all_its_modules() -> None:
    for eager, ours in _profiles("inductor", 2, 10**9):
        assert set(_ranges(ours)) == set(_ranges(eager))
        assert any(", FSDP::" in name for name in ours)


def _gathers(rank: int, inner_backend: str) -> int:
    twins = Twins(rank, "frozen_first", options={"inner_backend": inner_backend})
    twins.train()
    batch = twins.batch()
    return gathers_of(lambda: loss_of(twins.ours.model, batch).backward())


# The backward hook gathers the trained layer, though no gradient needs it; an Inductor pass removes that gather, which
# passes/post_grad/test_remove_unread.py also proves.
@pytest.mark.parametrize(
    ("inner_backend", "of_backward"), [("aot_eager", 1), pytest.param("inductor", 0, marks=pytest.mark.slow)]
)
def test_backward_does_not_gather_frozen_layer_it_never_reaches(inner_backend: str, of_backward: int) -> None:
    for gathers in run_ranks(2, _gathers, inner_backend):
        assert gathers == 3 + of_backward  # forward gathers: root, frozen layer, trained layer
