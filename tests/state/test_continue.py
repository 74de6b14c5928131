"""A run resumed on other ranks has the losses of an uninterrupted run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import compile_fsdp
from compile_fsdp.state import async_save, load, save
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.models.reference import Stack
from helpers.ranks.pools import run_ranks
from helpers.ranks.worlds import world_of

GLOBAL_BATCH = 8  # rows of a step over all ranks


def _losses(rank: int, size: int, compiled: bool, path: str | None, steps: Iterable[int]) -> list[float]:
    """Train from the checkpoint in `path`, if any, and save at the end."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = shard_blocks(Stack(), mesh=init_device_mesh("cpu", (size,)))
    if compiled:
        compile_whole(model, inner_backend="aot_eager")
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    first, *_ = steps = list(steps)
    if first > 0 and path is not None:
        with torch.no_grad():
            model.inp.weight.zero_()
        assert load(model, optim, path) == first
    losses = []
    for step in steps:
        torch.manual_seed(100 + step)
        x, y = torch.randn(GLOBAL_BATCH, 8), torch.randn(GLOBAL_BATCH, 3)
        loss = model(x.chunk(size)[rank], y.chunk(size)[rank])
        loss.backward()
        optim.step()
        optim.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
    if path is not None:
        if compiled:
            save(model, optim, path, steps[-1] + 1)
        else:
            async_save(model, optim, path, steps[-1] + 1).wait()
    if compiled:
        assert {report.direction for report in compile_fsdp.reports()} == {"forward", "backward"}
    return losses


def _stops_and_goes_on(rank: int, folder: str) -> tuple[list[float], list[float]]:
    path = f"{folder}/run"
    parts: list[float] = []
    whole: list[float] = []
    plan = [(2, True, range(0, 3)), (4, False, range(3, 6)), (1, False, range(6, 8)), (2, True, range(8, 12))]
    for number, (size, compiled, steps) in enumerate(plan):
        torch._dynamo.reset()
        compile_fsdp.reset_reports()
        with world_of(rank, size, folder, str(number)) as inside:
            if inside:
                parts += _losses(rank, size, compiled, path, steps)
    torch._dynamo.reset()
    with world_of(rank, 2, folder, "uninterrupted") as inside:
        if inside:
            whole = _losses(rank, 2, True, None, range(12))
    return parts, whole


def test_resumed_run_matches_uninterrupted_losses(tmp_path: Path) -> None:
    parts, whole = run_ranks(4, _stops_and_goes_on, str(tmp_path))[0]
    assert len(parts) == 12 and len(set(whole)) == 12
    assert parts == pytest.approx(whole, rel=1e-6, abs=1e-6)
