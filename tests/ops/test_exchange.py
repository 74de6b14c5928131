"""Two gloo ranks exchange one message each way; results are bitwise equal to gloo's collectives."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from compile_fsdp.ops import all_gather_into_tensor, reduce_scatter_tensor
from helpers.ranks.pools import device_type, run_ranks

pytestmark = pytest.mark.skipif(device_type() != "cpu", reason="gloo only")

torchs = torch.ops._c10d_functional
wait = torchs.wait_tensor


def _world() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def _calls(run: Iterator[torch.Tensor]) -> list[tuple[torch.Tensor, str]]:
    """Each result, and the collectives that made it."""
    found = []
    while True:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            result = next(run, None)
        if result is None:
            return found
        ops = {each.key for each in profiled.key_averages() if each.key.startswith("c10d::")}
        found.append((result, ", ".join(sorted(ops))))


def _exchanges(rank: int, dtype: torch.dtype) -> list[bool]:
    torch.manual_seed(rank)
    world = _world()
    equal = []
    for shape in ((2, 3), (1000,)):
        x = torch.randn(shape).to(dtype)  # values that a sum has to round
        kept = x.clone()
        gathered = torch.cat([x, x])
        wait(torchs.all_gather_into_tensor_out(x, 2, world, out=gathered))
        equal.append(torch.equal(wait(all_gather_into_tensor(x, 2, world, "")), gathered))
        for reduce_op in ("sum", "avg"):
            expected = wait(torchs.reduce_scatter_tensor(x, reduce_op, 2, world))
            launched = reduce_scatter_tensor(x, reduce_op, 2, world, "")
            received = wait(launched)
            wait(received)  # a second wait adds nothing
            equal.append(torch.equal(received, expected))
        equal.append(torch.equal(x, kept))
    return equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_results_are_bitwise_equal_to_gloos_collectives(dtype: torch.dtype) -> None:
    assert run_ranks(2, _exchanges, dtype) == [[True] * 8] * 2


def _kinds(rank: int) -> dict[str, str]:
    world, ranks = _world(), dist.get_world_size()
    x, whole = torch.ones(2 * ranks, 2), torch.ones(2 * ranks, 2, dtype=torch.int64)

    def run() -> Iterator[torch.Tensor]:
        yield wait(all_gather_into_tensor(x, ranks, world, ""))
        yield wait(all_gather_into_tensor(x.t(), ranks, world, ""))
        yield wait(reduce_scatter_tensor(x, "avg", ranks, world, ""))
        yield wait(reduce_scatter_tensor(x, "max", ranks, world, ""))
        yield wait(reduce_scatter_tensor(whole, "sum", ranks, world, ""))
        yield wait(all_gather_into_tensor(x[:0], ranks, world, ""))

    kinds = ("gather", "gather of a view", "mean", "maximum", "sum of integers", "gather of nothing")
    return {kind: calls for kind, (_, calls) in zip(kinds, _calls(run()), strict=True)}


EXCHANGE, GATHER, REDUCE = "c10d::alltoall_base_", "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"


def test_two_ranks_exchange_gathers_and_floating_point_means() -> None:
    exchanged = dict.fromkeys(("gather", "gather of a view", "mean"), EXCHANGE)
    for kinds in run_ranks(2, _kinds):
        others = [kinds.pop(kind) for kind in ("maximum", "sum of integers", "gather of nothing")]
        assert kinds == exchanged
        assert EXCHANGE not in others


def test_more_ranks_use_gloos_collectives() -> None:
    for kinds in run_ranks(3, _kinds):
        assert EXCHANGE not in kinds.values()
        assert kinds["gather"] == GATHER


def _forget(rank: int) -> list[float]:
    world = _world()
    for _ in range(3):
        reduce_scatter_tensor(torch.ones(4), "sum", 2, world, "")
        all_gather_into_tensor(torch.ones(4), 2, world, "")
        gc.collect()
    launched = [reduce_scatter_tensor(torch.full((4,), float(i)), "avg", 2, world, "") for i in range(3)]
    gc.collect()  # nothing else owns the sent tensors
    return [wait(each)[0].item() for each in reversed(launched)]


def test_collective_without_a_wait_does_no_harm() -> None:
    assert run_ranks(2, _forget) == [[2.0, 1.0, 0.0]] * 2
