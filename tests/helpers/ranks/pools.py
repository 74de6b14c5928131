"""Run functions on ranks in process pools that live for the session.

A pool is started once per world size and device. Its ranks run one function at a time and keep their process group for
the next function.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compile_fsdp.tools.launch import RankError, Ranks, join
from helpers.ranks.devices import missing_for, prepare
from helpers.ranks.forked import forkserver, leave_to_rest

DEFAULT_TIMEOUT_S = 540.0  # a busy machine takes four times as long as an idle one

# TORCH_FR_BUFFER_SIZE of the ranks: number of collectives in the flight recorder. Each entry keeps alive the code that
# issued it, the compiled code, and the process group with its threads.
TRACE_BUFFER_SIZE = "400"

# Variable with the device type of the ranks' tensors and meshes; see `helpers.ranks.devices`.
_DEVICE_VARIABLE = "COMPILE_FSDP_TEST_DEVICE"


def device_type() -> str:
    """This rank's device type; in the test process, pytest's --device."""
    return os.environ.get(_DEVICE_VARIABLE, "cpu")


def set_device_type(device_type: str) -> None:
    os.environ[_DEVICE_VARIABLE] = device_type


class RankPool:
    """`world_size` processes that run functions of the test modules."""

    def __init__(self, world_size: int, device: str) -> None:
        self.calls = 0
        self.is_fresh = True  # whether the ranks must create a new process group
        self.ranks = Ranks(world_size, forkserver())
        self.ranks.run(_prepare, device, timeout_s=DEFAULT_TIMEOUT_S)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
        """Call `function(rank, *args)` on every rank and return the results, by rank. See `Ranks.run`."""
        self.calls += 1
        meeting = str(self.calls) if self.is_fresh else None
        source = sys.modules[function.__module__].__file__
        self.is_fresh = True  # also after an error
        try:
            replies = self.ranks.run(_run_one, meeting, source, function.__qualname__, args, timeout_s=timeout_s)
        except RankError:
            raise
        except BaseException:
            self.ranks.kill()  # after pytest's time limit, for example, or the next call would get this one's replies
            raise
        left = {(are_clean, rounds) for _, are_clean, rounds in replies}
        self.is_fresh = len(left) > 1 or not all(are_clean for are_clean, _ in left)
        return [value for value, *_ in replies]

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.ranks.processes)


_pools: dict[tuple[int, str], RankPool] = {}


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: str | None = None,
) -> list[Any]:
    """Call `function(rank, *args)` of a test module on ranks of a device, by default pytest's --device.

    Returns the results, by rank. See `RankPool.run`.
    """
    device = device or device_type()
    if missing := missing_for(device, world_size):
        import pytest

        pytest.skip(missing)
    pool = _pools.get((world_size, device))
    if pool is None or not pool.is_alive:
        if pool is not None:
            pool.ranks.kill()
        pool = _pools[world_size, device] = RankPool(world_size, device)
    return pool.run(function, *args, timeout_s=timeout_s)


def close_pools() -> None:
    for pool in _pools.values():
        pool.ranks.kill()
    _pools.clear()


def _prepare(rank: int, device: str) -> None:
    import torch

    os.environ["TORCH_FR_BUFFER_SIZE"] = TRACE_BUFFER_SIZE
    os.environ["KINETO_LOG_LEVEL"] = "6"  # no line per profile
    set_device_type(device)
    torch.set_num_threads(1)
    prepare(device, rank)


def _run_one(rank: int, meeting: str | None, source: str, name: str, args: Any) -> tuple[Any, bool, int]:
    """Return the result, whether the process groups are clean, and in how many rounds ranks have agreed on decisions.

    Clean: the default group is unchanged, and only shared meshes have created groups.
    """
    import torch
    import torch.distributed as dist

    import compile_fsdp
    from compile_fsdp.backend import agreement
    from compile_fsdp.replay import bundle
    from helpers.ranks.meshes import group_count

    function = getattr(_load(source), name)
    torch._dynamo.reset()
    compile_fsdp.reset_reports()
    leave_to_rest()
    if meeting is not None:
        _meet(meeting)
    agreement._agreed.clear()
    world = dist.group.WORLD
    try:
        # Otherwise a rank without collectives could close its connections while the remaining ranks still connect.
        dist.barrier()
        with TemporaryDirectory() as folder:
            bundle.own_folder = lambda: Path(folder)  # empty, so no test starts from the bundle of another one
            result = function(rank, *args)
        are_clean = dist.group.WORLD is world and dist.get_pg_count() == 1 + group_count()
        return result, are_clean, sum(each.rounds for each in agreement._agreed.values())
    finally:
        torch.manual_seed(0)
        forget_meshes()
        if device_type() != "cpu":
            # Otherwise the next function could allocate memory that a stream of this function still reads.
            torch.get_device_module(device_type()).synchronize()


def _meet(meeting: str) -> None:
    """Create the ranks' process group: once, and again only after a test that failed or created groups.

    `helpers.ranks.meshes` says why.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    join(torch.device(device_type()), meeting=meeting)


def forget_meshes() -> None:
    """Clear DTensor's caches, whose meshes equal new meshes but have destroyed process groups."""
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()


def _load(source: str) -> Any:
    # Test modules have no importable name (pytest's importlib mode), so a rank loads them by file.
    name = "_".join(("ranks", *Path(source).with_suffix("").parts[1:]))
    if name not in sys.modules:
        from _pytest.assertion.rewrite import rewrite_asserts

        spec = importlib.util.spec_from_file_location(name, source)
        assert spec is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        tree = ast.parse(text := Path(source).read_bytes())
        rewrite_asserts(tree, text)  # so that a failed assert tells its values
        exec(compile(tree, source, "exec", dont_inherit=True), vars(module))
    return sys.modules[name]
