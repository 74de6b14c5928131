"""Ranks with different graphs all raise, and no rank waits forever."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import compile_fsdp
from compile_fsdp.errors import CollectiveMismatchError, RankMissingError
from compile_fsdp.passes import Costs
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.parity.check import full_grads
from helpers.parity.twins import AOT_EAGER
from helpers.ranks.pools import run_ranks
from helpers.ranks.tests import on_ranks


def _model(widths: list[int]) -> Any:
    torch.manual_seed(0)
    return shard_blocks(nn.Sequential(*(nn.Linear(before, after) for before, after in pairwise(widths))))


def _step(model: nn.Module, options: Mapping[str, object]) -> None:
    compile_whole(model, **options)(torch.ones(2, 8)).mean().backward()


def _error_of(model: nn.Module, options: Mapping[str, object] = AOT_EAGER) -> tuple[str, str]:
    try:
        _step(model, options)
    except (CollectiveMismatchError, RankMissingError) as error:
        return type(error).__name__, str(error)
    return "", ""


def _other_width(rank: int) -> tuple[str, str]:
    return _error_of(_model([8, 8, 8 + 8 * rank]))


def test_all_ranks_name_the_first_differing_collective() -> None:
    errors = run_ranks(2, _other_width)
    assert errors[0] == errors[1] and errors[0][0] == "CollectiveMismatchError"
    for part in ("forward graph", "on rank 0 all_gather_into_tensor of float32[36]", "on rank 1", "float32[72]", "(1)"):
        assert part in errors[0][1]


@on_ranks(2)
def test_graphs_are_compared_after_passes_and_the_model_stays_usable(rank: int) -> None:
    model = _model([8, 8])
    one_by_one = Costs(latency=0.0, comm_bandwidth=1e9, memory_bandwidth=1e9, flops=1e9)
    kind, message = _error_of(model, {"costs": one_by_one} if rank else {})
    assert kind == "CollectiveMismatchError"
    assert "position 0: on rank 0 all_gather_into_tensor of float32[36]" in message and "float32[32]" in message
    _step(model, {})  # usable after the error
    assert all(grad.abs().sum() > 0 for grad in full_grads(model).values())


@on_ranks(2)
def test_missing_rank_is_named(rank: int) -> None:
    model = _model([8, 8])
    if rank == 0:
        kind, message = _error_of(model, {**AOT_EAGER, "agreement_timeout_s": 1.0})
        assert kind == "RankMissingError" and "expected rank 1 to compile its forward graph within 1 s" in message
    dist.barrier()


@on_ranks(4)
def test_ranks_that_have_trained_with_other_groups_before_agree(rank: int) -> None:
    meshes = [init_device_mesh("cpu", (4,))]
    pair = dist.new_group([0, 1])
    if rank < 2:
        meshes.insert(0, DeviceMesh.from_group(pair, "cpu"))
    for mesh in meshes:
        model = compile_fsdp.fully_shard(nn.Linear(8, 8), mesh=mesh)
        compile_whole(model, **AOT_EAGER, agreement_timeout_s=20.0)
        model(torch.ones(2, 8)).sum().backward()
        assert model.weight.grad is not None


@on_ranks(2)
def test_wait_for_a_late_rank_is_reported(rank: int, tmp_path: Path) -> None:
    """Rank 1 compiles only after rank 0 reports that it waits."""
    waits = tmp_path / "waits"

    class Said(io.StringIO):
        def write(self, text: str) -> int:
            if "waiting for" in text:
                waits.touch()
            return super().write(text)

    model = _model([8, 8])
    deadline = time.monotonic() + 100.0
    while rank == 1 and not waits.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    with contextlib.redirect_stderr(said := Said()):
        _step(model, AOT_EAGER)
    assert rank == 1 or "waiting for the other ranks' forward graph" in said.getvalue()


@on_ranks(2)
def test_one_rank_may_recompile_alone(rank: int) -> None:
    """Rank 0 trains with a longer batch."""
    model = _model([8, 8, 8, 8])
    # Compute is negligible beside a collective for 2 rows, and far longer for 20,000 rows.
    costs = Costs(latency=1e-4, comm_bandwidth=1e9, memory_bandwidth=1e9, flops=1e9)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        _step(model, {"agreement_timeout_s": 20.0, "costs": costs})
        model.zero_grad()
        rows = 2 if rank else 20_000
        model(torch.ones(rows, 8)).mean().backward()
    eager = _model([8, 8, 8, 8])
    eager(torch.ones(rows, 8)).mean().backward()
    torch.testing.assert_close(full_grads(model), full_grads(eager))
    assert len(compile_fsdp.reports()) == (2 if rank else 4)
