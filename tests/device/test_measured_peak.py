"""A step that exceeds its memory budget on the emulated device is compiled once more, for less memory."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import compile_fsdp
from compile_fsdp.backend.measured_peak import _mesh_group_names
from compile_fsdp.passes import Costs
from compile_fsdp.passes.dynamo import fit_memory_budget
from compile_fsdp.reports import count_captures, reports, reset_reports
from compile_fsdp.runtime.attached import module_hooks_of
from helpers.logs import logged
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.models.layers import Wide
from helpers.parity.check import full
from helpers.ranks.fake_world import fake_world
from helpers.ranks.pools import run_ranks
from helpers.releases.skip import skip_before

DEVICE = "emulated"
BLOCKS, DIM, STEPS = 4, 32, 4
COSTS = Costs(latency=1e-6, comm_bandwidth=1e9, memory_bandwidth=6e9, flops=1e9)


def _train(
    rank: int,
    budget: int,
    margin: float,
    rows: tuple[int, int] = (256, 256),
    is_hidden: bool = False,
    bundle: str | None = None,
) -> tuple[Any, ...]:
    """Peak of each step, bytes kept free by each decision and its estimate, warnings, and the last gradients.

    `margin` is that of the estimate; `rows` are the batch sizes of the ranks; `is_hidden`: a peak before the first step
    is higher than that of all steps; with a `bundle`, Inductor compiles.
    """
    device = torch.get_device_module(DEVICE)
    torch.manual_seed(0)
    model, batch = Wide(BLOCKS, DIM), torch.randn(rows[rank], DIM)
    shard_blocks(model)
    reset_reports()
    options = {"inner_backend": "aot_eager"} if bundle is None else {"bundle": bundle}
    compile_whole(model, memory_budget=budget, costs=COSTS, progress=False, **options)
    peaks = []
    with logged() as texts, mock.patch.object(fit_memory_budget, "MARGIN", margin):
        for step in range(STEPS):
            model.zero_grad()
            held = device.memory_allocated()
            if step or not is_hidden:
                device.reset_peak_memory_stats()
            else:
                torch.empty(2 * budget)
            model(batch).backward()
            peaks.append(device.max_memory_allocated() - held)
    decisions = [report.decision for report in reports() if report.decision is not None]
    estimates = [(each.lowered, each.peak_bytes) for each in decisions]
    gradients = [full(parameter.grad).cpu() for parameter in model.parameters() if parameter.grad is not None]
    return peaks, estimates, texts, gradients


@cache
def _run(*args: Any) -> list[tuple[Any, ...]]:
    return run_ranks(2, _train, *args, device=DEVICE)


PLENTY = 10**9


def _train_two_graphs(rank: int, budget: int) -> tuple[list[int], list[int]]:
    """Peak of each of six steps, the last three without the last block, and bytes kept free by each decision."""
    device, peaks = torch.get_device_module(DEVICE), []
    model = Wide(BLOCKS, DIM)
    shard_blocks(model)
    reset_reports()
    compile_whole(model, inner_backend="aot_eager", memory_budget=budget, costs=COSTS, progress=False)
    with mock.patch.object(fit_memory_budget, "MARGIN", 0.75):
        for step in range(6):
            if step == 3:
                del model.blocks[-1]
            batch = torch.randn(256 if step < 3 else 352, DIM)
            model.zero_grad()
            held = device.memory_allocated()
            device.reset_peak_memory_stats()
            model(batch).backward()
            peaks.append(device.max_memory_allocated() - held)
    return peaks, [report.decision.lowered for report in reports() if report.decision is not None]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param((256, 256), id="equal batches", marks=pytest.mark.slow),
        pytest.param((256, 128), id="a smaller batch"),
    ],
)
def test_next_step_is_within_the_budget(rows: tuple[int, int]) -> None:
    plenty = _run(PLENTY, 1.0, rows)
    budget = int(0.7 * plenty[0][0][0])
    little = _run(budget, 0.75, rows)
    (peak, *_), ((_, estimate), _), *_ = little[0]
    assert peak > budget > estimate
    for (_, _, _, expected), (peaks, estimates, texts, gradients) in zip(plenty, little, strict=True):
        # On both ranks, although only the first may have exceeded its budget.
        assert [lowered for lowered, _ in estimates] == [0, peak - estimate]
        assert max(peaks[1:]) <= budget
        assert [text for text in texts if "exceeded its memory_budget" in text]
        torch.testing.assert_close(gradients, expected, rtol=1e-6, atol=1e-8)


def test_second_graph_is_held_to_the_budget_too() -> None:
    budget = int(0.7 * _run(PLENTY, 1.0, (256, 256))[0][0][0])
    for peaks, lowered in run_ranks(2, _train_two_graphs, budget, device=DEVICE):
        assert min(peaks[0], peaks[3]) > budget >= max(peaks[1:3] + peaks[4:])
        assert [bool(each) for each in lowered] == [False, True, False, True]


def test_step_that_fits_is_compiled_once() -> None:
    for _, estimates, texts, _ in _run(PLENTY, 1.0, (256, 256)):
        assert (len(estimates), texts) == (1, [])


def test_earlier_peak_hides_that_of_the_step() -> None:
    budget = int(0.7 * _run(PLENTY, 1.0, (256, 256))[0][0][0])
    for peaks, estimates, texts, _ in _run(budget, 0.75, (256, 256), True):
        assert peaks[1] > budget
        assert (len(estimates), texts) == (1, [])


def test_step_that_cannot_fit_goes_on_with_the_least_memory() -> None:
    for peaks, ((_, estimate), (lowered, _)), texts, _ in _run(100_000, 0.05):
        assert lowered == peaks[0] - min(estimate, 100_000)
        assert len(texts) == 1
        assert 100_000 < peaks[2] <= peaks[0]


def _restart(rank: int, budget: int, bundle: str) -> tuple[list[int], int]:
    """Peaks of a second model, and the number of graphs that it traced."""
    _train(rank, budget, 0.9, bundle=bundle)
    dist.barrier()  # the bundle is written
    traced = count_captures()
    peaks, *_ = _train(rank, budget, 0.9, bundle=bundle)
    return peaks, count_captures() - traced


@pytest.mark.slow
def test_steps_of_a_bundle_are_measured_too(tmp_path: Path) -> None:
    skip_before("2.13")
    plenty = _run(PLENTY, 1.0, (256, 256), False, str(tmp_path / "plenty.bundle"))
    budget = int(0.7 * plenty[0][0][0])
    for peaks, traced in run_ranks(2, _restart, budget, str(tmp_path / "step.bundle"), device=DEVICE):
        assert peaks[0] > budget >= max(peaks[1:])
        assert traced == 0  # the bundle has both steps


def test_ranks_of_all_mesh_dims_decide_together() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = torch.nn.Linear(4, 4)
        parallelize_module(model, mesh["tp"], ColwiseParallel())
        compile_fsdp.fully_shard(model, mesh=mesh["dp"])
        groups = module_hooks_of(model).hooks.groups
        expected = [mesh.get_group(dim).group_name for dim in ("dp", "tp")]
        assert _mesh_group_names(groups) == expected
