"""Compiled steps leave as much of their communication beside compute as eager ones, but for one gather."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from helpers.device.overlap import Overlap, launches_of, overlap_of
from helpers.models.reference import Stack
from helpers.ranks.pools import run_ranks


def _by_hand(rank: int, waits_first: bool) -> float:
    x, y = torch.ones(1000), torch.ones(64, 64)

    def run() -> None:
        work = dist.all_reduce(x, async_op=True)
        if waits_first:
            work.wait()
        for _ in range(20):
            y @ y
        work.wait()

    return overlap_of(launches_of(run)).share


def test_a_collective_is_hidden_by_what_is_launched_before_somebody_waits_for_it() -> None:
    assert run_ranks(2, _by_hand, False, device="emulated") == [1.0, 1.0]
    assert run_ranks(2, _by_hand, True, device="emulated") == [0.0, 0.0]


def _overlaps(rank: int) -> tuple[Overlap, Overlap]:
    """Of a training step, compiled, and by torch's eager FSDP2."""
    found = []
    for shard in (compile_fsdp.fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model = Stack(dim=64, layers=6)
        for block in model.layers:
            shard(block)
        shard(model)
        if shard is compile_fsdp.fully_shard:
            model.compile(backend="compile_fsdp", fullgraph=True)
        x = torch.randn(64, 64)

        def step(model: torch.nn.Module = model, x: torch.Tensor = x) -> None:
            model(x).backward()

        for _ in range(2):
            step()
        found.append(overlap_of(launches_of(step)))
    return found[0], found[1]


@pytest.mark.slow
def test_a_compiled_step_hides_all_that_an_eager_one_does_but_one_gather() -> None:
    """Eager FSDP2 gathers on a stream of its own: the backward's first gather runs beside the end of the forward.

    A collective of a graph comes behind all that its stream has been given, and so behind the forward.
    """
    for compiled, eager in run_ranks(2, _overlaps, device="emulated"):
        print(f"hidden: {compiled.share:.3f} compiled, {eager.share:.3f} eager")
        assert 0.8 < eager.share < 1
        assert compiled.duration == eager.duration
        assert compiled.hidden >= eager.hidden - compiled.longest
