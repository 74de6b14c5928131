"""What a profile shows of a compiled step's collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from compile_fsdp.ops import add_own_part_, exchange_parts, exchange_shards
from harness import device_type, run_ranks
from parity import loss_of
from recording import AS_GATHERS, collectives_of
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


OPTIONS: list[dict[str, object]] = [{"inner_backend": "aot_eager"}, {}, AS_GATHERS]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("budget", [None, 10**9])
def test_gathers_are_not_coalesced(options: dict[str, object], budget: int | None) -> None:
    """gloo cannot run two coalesced gathers at a time (ops/named_collectives.py)."""
    if device_type() != "cpu":
        pytest.skip("gloo only")
    is_exchange = options == {}
    for _, ours in run_ranks(2, _steps, {**options, "memory_budget": budget}):
        collectives = [op for op in ours if op.startswith("c10d::") and ("allgather" in op or "alltoall" in op)]
        assert collectives == ["c10d::alltoall_base_" if is_exchange else "c10d::_allgather_base_"]


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
    twins = Twins(rank, "frozen_first", options={"inner_backend": inner_backend, **AS_GATHERS})
    twins.train()
    batch = twins.batch()
    found = collectives_of(lambda: loss_of(twins.ours.model, batch).backward())
    return [each.kind for each in found if each.kind == "all_gather"]


def _exchanges(rank: int, dtype: torch.dtype) -> list[bool]:
    """Whether each kind of exchange makes what torch's collective does, of values that a sum has to round."""
    torch.manual_seed(rank)
    group = dist.group.WORLD
    assert group is not None
    torchs, wait = torch.ops._c10d_functional, torch.ops._c10d_functional.wait_tensor
    equal = []
    for shape in ((2, 3), (1000,)):
        shard = torch.randn(shape).to(dtype)
        expected = torch.cat([shard, shard])
        wait(torchs.all_gather_into_tensor_out(shard, 2, group.group_name, out=expected))
        equal.append(torch.equal(wait(exchange_shards(shard, 2, group.group_name, "")), expected))
        for reduce_op in ("sum", "avg"):
            expected = wait(torchs.reduce_scatter_tensor(shard, reduce_op, 2, group.group_name))
            received = wait(exchange_parts(shard, 2, group.group_name, ""))
            add_own_part_(received, shard, reduce_op, group.group_name)
            equal.append(torch.equal(received, expected))
    return equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_exchanges_are_bitwise_equal_to_torchs_collectives(dtype: torch.dtype) -> None:
    if device_type() != "cpu":
        pytest.skip("gloo only")
    assert run_ranks(2, _exchanges, dtype) == [[True] * 6] * 2


# The backward's hook gathers the trained layer, though no gradient needs it; a pass takes the gather out.
@pytest.mark.parametrize(("inner_backend", "of_backward"), [("aot_eager", 1), ("inductor", 0)])
def test_a_backward_gathers_no_frozen_layer_that_it_does_not_pass(inner_backend: str, of_backward: int) -> None:
    for gathers in run_ranks(2, _gathers, inner_backend):
        assert len(gathers) == 3 + of_backward  # of the forward: the root, the frozen and the trained layer
