"""Overlap of communication with compute in compiled and eager steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from helpers.device.overlap import launches_of, overlap_of
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.models.reference import Stack
from helpers.ranks.tests import on_ranks


@pytest.mark.parametrize("waits_first", [False, True])
@on_ranks(2, "emulated")
def test_compute_launched_before_the_wait_hides_a_collective(rank: int, waits_first: bool) -> None:
    x, y = torch.ones(1000), torch.ones(64, 64)

    def run() -> None:
        work = dist.all_reduce(x, async_op=True)
        if waits_first:
            work.wait()
        for _ in range(20):
            y @ y
        work.wait()

    assert overlap_of(launches_of(run)).share == (0.0 if waits_first else 1.0)


@pytest.mark.slow
@on_ranks(2, "emulated")
def test_compiled_step_hides_as_much_as_eager_except_one_gather(rank: int) -> None:
    """Only eager FSDP2 overlaps the backward's first all-gather with the forward.

    Eager FSDP2 gathers on a separate stream. A collective in a graph waits for all earlier work of its stream, and so
    for the forward.
    """
    found = []
    for shard in (compile_fsdp.fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model = shard_blocks(Stack(dim=64, layers=6), shard)
        if shard is compile_fsdp.fully_shard:
            # One collective for each block, as in eager FSDP2, because blocks this small would be gathered together.
            compile_whole(model, disabled_passes=("pack_gathers", "pack_reductions"))
        x = torch.randn(64, 64)

        def step(model: torch.nn.Module = model, x: torch.Tensor = x) -> None:
            model(x).backward()

        for _ in range(2):
            step()
        found.append(overlap_of(launches_of(step)))
    compiled, eager = found
    print(f"hidden: {compiled.share:.3f} compiled, {eager.share:.3f} eager")
    assert 0.8 < eager.share < 1
    assert compiled.duration == eager.duration
    assert compiled.hidden >= eager.hidden - compiled.longest
