"""Thousands of steps and dozens of deleted models do not leak."""

from __future__ import annotations

import gc
import os
import weakref
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

import compile_fsdp
from compile_fsdp.runtime.gather import GatherPlan
from compile_fsdp.runtime.reduction import Reduction
from helpers.parity.check import build, loss_of
from helpers.parity.twins import AOT_EAGER
from helpers.ranks.pools import TRACE_BUFFER_SIZE
from helpers.ranks.tests import on_ranks
from helpers.releases.differences import CACHES_NUMBERS, KEEPS_TRACE_CONSTANTS


def _held() -> dict[str, int]:
    """Count this process's tensors, their bytes, open files, and objects of compile_fsdp (`ours`)."""
    for _ in range(2):
        gc.collect()  # objects that the first collection finalizes, such as Dynamo's code, release more objects
    objects = gc.get_objects()
    tensors = [each for each in objects if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    held = {"tensors": len(tensors), "bytes": sum(storages.values())}
    kept = (GatherPlan, Reduction) if KEEPS_TRACE_CONSTANTS else ()
    ours = [each for each in objects if str(type(each).__module__).startswith("compile_fsdp")]
    held["ours"] = sum(not isinstance(each, kept) for each in ours)
    held["files"] = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return held


def _kinds() -> Counter[str]:
    """Count this process's objects by type."""
    gc.collect()
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


@pytest.mark.parametrize(
    "options",
    [
        AOT_EAGER,
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({**AOT_EAGER, "memory_budget": 2**20}, marks=pytest.mark.slow),
        pytest.param({"memory_budget": 2**20}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("steps", [120, pytest.param(5000, marks=pytest.mark.slow)])
@on_ranks(2)
def test_repeated_steps_do_not_leak(rank: int, steps: int, options: dict[str, Any]) -> None:
    case = build("mlp", compile_fsdp.fully_shard)
    case.model.compile(backend="compile_fsdp", fullgraph=True, options=options)
    optimizer = (torch.optim.SGD if CACHES_NUMBERS else torch.optim.AdamW)(case.model.parameters())
    batch = case.batch()

    def train(count: int) -> None:
        for _ in range(count):
            loss_of(case.model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(50)
    before = _held()
    kinds = [_kinds()]
    for _ in range(2):
        train(steps // 2)
        kinds.append(_kinds())
    after = _held()
    assert after["bytes"] <= before["bytes"] and after["tensors"] <= before["tensors"]
    assert after["files"] == before["files"]
    grown = [later - earlier for earlier, later in pairwise(kinds)]
    # The minimum ignores a single background event, such as logging, which is not caused by steps.
    assert min(each.total() for each in grown) < 50, grown
    assert len(compile_fsdp.reports()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 50])
@on_ranks(2)
def test_deleted_models_leave_nothing_behind(rank: int, count: int) -> None:
    alive: list[weakref.ref[Any]] = []

    def train(count: int) -> None:
        for _ in range(count):
            case = build("mlp", compile_fsdp.fully_shard)
            case.model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
            loss_of(case.model, case.batch()).backward()
            alive.extend(weakref.ref(each) for each in (case.model, *case.model.parameters()))
            compile_fsdp.reset_reports()
        del case
        # Flush torch's flight recorder, because its last entries keep the issuing code and Dynamo's cache for it.
        for _ in range(int(TRACE_BUFFER_SIZE)):
            dist.all_reduce(torch.ones(1))

    train(2)
    before = _held()
    train(count)
    after = _held()
    assert all(each() is None for each in alive)
    # Do not compare tensors: the cache of compiled autograd keeps everything that it captured.
    for name in ("bytes", "ours", "files"):
        assert after[name] <= before[name], name
