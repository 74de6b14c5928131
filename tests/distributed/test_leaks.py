"""Thousands of steps, and dozens of models, leave nothing behind."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch

import compile_fsdp
from harness import run_ranks
from parity import build, loss_of


def _held() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [each for each in objects if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    held = {"objects": len(objects), "tensors": len(tensors), "bytes": sum(storages.values())}
    if os.path.isdir("/proc/self/fd"):
        held["files"] = len(os.listdir("/proc/self/fd"))
    return held


def _many_steps(rank: int, steps: int, options: dict[str, Any]) -> tuple[dict[str, int], dict[str, int], int]:
    case = build("mlp", compile_fsdp.fully_shard)
    case.model.compile(backend="compile_fsdp", fullgraph=True, options=options)
    optimizer = torch.optim.AdamW(case.model.parameters())
    batch = case.batch()

    def train(count: int) -> None:
        for _ in range(count):
            loss_of(case.model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(50)
    before = _held()
    train(steps)
    return before, _held(), len(compile_fsdp.reports())


@pytest.mark.parametrize("options", [{}, {"inner_backend": "aot_eager"}, {"memory_budget": 2**20}])
@pytest.mark.parametrize("steps", [500, pytest.param(5000, marks=pytest.mark.slow)])
def test_steps_leave_nothing_behind(steps: int, options: dict[str, Any]) -> None:
    for before, after, graphs in run_ranks(2, _many_steps, steps, options, timeout_s=600.0):
        assert graphs == 2
        assert {**after, "objects": 0} == {**before, "objects": 0}
        # What others do in the background, logging for example, is not a matter of steps.
        assert after["objects"] - before["objects"] < 100


def _many_models(rank: int, count: int) -> tuple[list[dict[str, int]], int]:
    held, alive = [], []
    for _ in range(count):
        case = build("mlp", compile_fsdp.fully_shard)
        case.model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
        loss_of(case.model, case.batch()).backward()
        alive += [weakref.ref(case.model), *(weakref.ref(parameter) for parameter in case.model.parameters())]
        del case
        compile_fsdp.reset_reports()
        held.append(_held())
    return held, sum(each() is not None for each in alive)


@pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_deleted_models_leave_nothing_behind(count: int) -> None:
    for held, alive in run_ranks(2, _many_models, count, timeout_s=600.0):
        assert alive == 0
        assert [each["bytes"] for each in held[2:]] == [held[2]["bytes"]] * (count - 2)
        assert held[-1]["files"] == held[2]["files"]
        assert held[-1]["objects"] - held[2]["objects"] < 100 * count
