"""The emulated device's memory: poison, reuse, statistics, and protection from the host."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.device.install import held, install
from helpers.ranks.pools import run_ranks

TESTS = Path(__file__).parents[1]


def _poisoned(rank: int) -> list[Any]:
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8)
    for dtype in dtypes:
        torch.ones(1000, dtype=dtype)  # freed at once
    return [torch.empty(1000, dtype=dtype).tolist() for dtype in dtypes]


def test_new_allocations_are_poisoned() -> None:
    (values,) = run_ranks(1, _poisoned, device="emulated")
    *floats, longs, ints, chars = values
    assert all(math.isnan(each) for column in floats for each in column)
    assert all(each % 2 == 1 for column in (longs, ints, chars) for each in column)


def _reused(rank: int) -> tuple[bool, bool, bool]:
    side = torch.emulated.Stream()
    first = torch.empty(1000)
    address = first.data_ptr()
    del first
    with torch.emulated.stream(side):
        of_other_stream = torch.empty(1000).data_ptr()
    again = torch.empty(1000)
    other_size = torch.empty(2000).data_ptr()
    return again.data_ptr() == address, of_other_stream == address, other_size == address


def test_freed_memory_is_reused_at_once_by_its_own_stream_only() -> None:
    assert run_ranks(1, _reused, device="emulated") == [(True, False, False)]


def _recorded(rank: int) -> tuple[bool, bool, bool]:
    side = torch.emulated.Stream()
    tensor = torch.ones(1000)
    address = tensor.data_ptr()
    side.wait_stream(torch.emulated.current_stream())
    with held():
        with torch.emulated.stream(side):
            sums = tensor + 1
        tensor.record_stream(side)
        del tensor
        early = torch.empty(1000).data_ptr()
    side.synchronize()
    late = torch.empty(1000).data_ptr()
    return early == address, late == address, bool((sums.cpu() == 2).all())


def test_record_stream_keeps_memory_until_the_stream_is_done() -> None:
    assert run_ranks(1, _recorded, device="emulated") == [(False, True, True)]


def _counted(rank: int) -> list[int]:
    extension, module = install(), torch.emulated
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    held = torch.empty(128)  # 512 bytes, a granule
    dropped = torch.empty(1024)
    del dropped
    side = module.Stream()
    with module.stream(side):
        of_side = torch.empty(256)
    by_stream = extension.statistics()["allocated_bytes_by_stream"]
    figures = [module.memory_allocated() - before, module.max_memory_allocated() - before, by_stream[side.stream_id]]
    assert torch.accelerator.memory_allocated() == module.memory_allocated()
    del held, of_side
    return [*figures, module.memory_allocated() - before]


def test_statistics_count_current_peak_and_per_stream_bytes() -> None:
    assert run_ranks(1, _counted, device="emulated") == [[512 + 1024, 512 + 4096, 1024, 0]]


def _resized(rank: int) -> tuple[list[float], list[float]]:
    tensor = torch.arange(4.0)
    storage = tensor.untyped_storage()
    storage.resize_(32)
    kept = tensor.tolist()
    storage.resize_(0)
    with pytest.raises(RuntimeError, match="is freed: needs 16 bytes, found 0"):
        tensor + 1
    storage.resize_(16)
    return kept, tensor.tolist()


def test_growing_a_storage_keeps_its_data_and_reading_a_freed_one_raises() -> None:
    ((kept, after),) = run_ranks(1, _resized, device="emulated")
    assert kept == [0, 1, 2, 3]
    assert all(math.isnan(each) for each in after)


READ = """
import ctypes, torch
from helpers.device.install import held, install
install()
tensor = torch.ones(4, device="emulated")
torch.emulated.synchronize()
print(ctypes.c_float.from_address(tensor.data_ptr()).value)
"""


def test_host_access_to_device_memory_kills_the_process() -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run([sys.executable, "-c", READ], cwd=TESTS, capture_output=True, text=True, env=environment)
    assert done.returncode < 0
    assert "host code touched device memory" in done.stderr
    assert done.stdout == ""
