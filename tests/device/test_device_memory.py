"""The emulated device's memory: poison, reuse, statistics, and protection from the host."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.device.install import held, install
from helpers.ranks.tests import on_ranks

TESTS = Path(__file__).parents[1]


@on_ranks(1, "emulated")
def test_new_allocations_are_poisoned(rank: int) -> None:
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8)
    for dtype in dtypes:
        torch.ones(1000, dtype=dtype)  # freed at once
    for dtype in dtypes:
        values = torch.empty(1000, dtype=dtype).tolist()
        assert all(math.isnan(each) if dtype.is_floating_point else each % 2 == 1 for each in values), dtype


@on_ranks(1, "emulated")
def test_freed_memory_is_reused_at_once_by_its_own_stream_only(rank: int) -> None:
    side = torch.emulated.Stream()
    first = torch.empty(1000)
    address = first.data_ptr()
    del first
    with torch.emulated.stream(side):
        assert torch.empty(1000).data_ptr() != address
    again = torch.empty(1000)
    assert again.data_ptr() == address
    assert torch.empty(2000).data_ptr() != address


@on_ranks(1, "emulated")
def test_record_stream_keeps_memory_until_the_stream_is_done(rank: int) -> None:
    side = torch.emulated.Stream()
    tensor = torch.ones(1000)
    address = tensor.data_ptr()
    side.wait_stream(torch.emulated.current_stream())
    with held():
        with torch.emulated.stream(side):
            sums = tensor + 1
        tensor.record_stream(side)
        del tensor
        assert torch.empty(1000).data_ptr() != address
    side.synchronize()
    assert torch.empty(1000).data_ptr() == address
    assert bool((sums.cpu() == 2).all())


@on_ranks(1, "emulated")
def test_statistics_count_current_peak_and_per_stream_bytes(rank: int) -> None:
    extension, module = install(), torch.emulated
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    held = torch.empty(128)  # 512 bytes, a granule
    dropped = torch.empty(1024)
    del dropped
    side = module.Stream()
    with module.stream(side):
        of_side = torch.empty(256)
    assert module.memory_allocated() - before == 512 + 1024
    assert module.max_memory_allocated() - before == 512 + 4096
    assert extension.statistics()["allocated_bytes_by_stream"][side.stream_id] == 1024
    assert torch.accelerator.memory_allocated() == module.memory_allocated()
    del held, of_side
    assert module.memory_allocated() == before


@on_ranks(1, "emulated")
def test_growing_a_storage_keeps_its_data_and_reading_a_freed_one_raises(rank: int) -> None:
    tensor = torch.arange(4.0)
    storage = tensor.untyped_storage()
    storage.resize_(32)
    assert tensor.tolist() == [0, 1, 2, 3]
    storage.resize_(0)
    with pytest.raises(RuntimeError, match="is freed: needs 16 bytes, found 0"):
        tensor + 1
    storage.resize_(16)
    assert all(math.isnan(each) for each in tensor.tolist())


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
