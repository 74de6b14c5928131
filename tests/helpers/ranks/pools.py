"""Run functions on ranks in process pools that live for the session.

A pool is started once per world size and device. Its ranks run one function at a time and keep their process group for
the next function. If a rank hangs, its pool is killed, and the test fails with the stack of every unfinished rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from helpers.ranks.devices import missing_for, prepare
from helpers.ranks.forked import forkserver, leave_to_rest

DEFAULT_TIMEOUT_S = 240.0

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


class RankError(AssertionError):
    """Raised if a rank raises; contains the traceback of every such rank."""


class RankTimeout(AssertionError):
    """Raised if a rank dies or times out; contains the stacks of unfinished ranks."""


@dataclass
class _Rank:
    process: Any
    connection: Connection
    stack_file: Path


@dataclass(frozen=True)
class _Left:
    """Process groups at the end of a test.

    Attributes:
        alone: Whether the default group is unchanged, and only shared meshes have created groups.
        agreements: Number of rounds in which ranks have agreed on a decision.
    """

    alone: bool
    agreements: int


_Reply = tuple[str, Any, _Left | None]


class RankPool:
    """`world_size` processes that run functions of the test modules."""

    def __init__(self, world_size: int, device: str) -> None:
        self.world_size = world_size
        self.directory = Path(tempfile.mkdtemp(prefix="compile_fsdp_ranks_"))
        self.calls = 0
        self.is_fresh = True  # whether the ranks must create a new process group
        context = forkserver()
        self.ranks: list[_Rank] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            stack_file = self.directory / f"stack_{rank}"
            process = context.Process(
                target=_serve, args=(rank, world_size, device, theirs, str(stack_file)), daemon=True
            )
            process.start()
            theirs.close()
            self.ranks.append(_Rank(process, ours, stack_file))

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
        """Call `function(rank, *args)` on every rank and return the results, by rank.

        Raises:
            RankError: if a rank raises.
            RankTimeout: if a rank dies or does not return within `timeout_s` seconds; the pool is closed.
        """
        self.calls += 1
        store = str(self.directory / f"store_{self.calls}")
        source = sys.modules[function.__module__].__file__
        for rank in self.ranks:
            rank.connection.send((store if self.is_fresh else None, source, function.__qualname__, args))
        replies = self._collect(timeout_s)
        errors = [f"rank {i}:\n{reply[1]}" for i, reply in enumerate(replies) if reply[0] == "error"]
        left = {reply[2] for reply in replies}
        self.is_fresh = len(left) > 1 or not all(each and each.alone for each in left)
        if errors:
            raise RankError("\n".join(errors))
        return [value for _, value, _ in replies]

    def _collect(self, timeout_s: float) -> list[_Reply]:
        deadline = time.monotonic() + timeout_s
        replies: dict[int, _Reply] = {}
        while len(replies) < self.world_size:
            for i, rank in enumerate(self.ranks):
                if i in replies or not rank.connection.poll(0.01):
                    continue
                try:
                    replies[i] = rank.connection.recv()
                except EOFError:
                    self._fail(replies, f"rank {i} died with exit code {rank.process.exitcode}")
                if replies[i][0] == "error":
                    # The other ranks may wait in a collective forever, so they get only a few more seconds.
                    deadline = min(deadline, time.monotonic() + 5.0)
            if time.monotonic() > deadline:
                errors = [f"rank {i} raised:\n{r[1]}" for i, r in replies.items() if r[0] == "error"]
                self._fail(replies, "\n".join(errors) or f"not finished after {timeout_s:.0f} s")
        return [replies[i] for i in range(self.world_size)]

    def _fail(self, replies: dict[int, _Reply], what: str) -> None:
        waiting = [i for i in range(self.world_size) if i not in replies]
        for i in waiting:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(self.ranks[i].process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = [f"rank {i} was at:\n{self.ranks[i].stack_file.read_text()[-4000:]}" for i in waiting]
        self.close()
        raise RankTimeout("\n".join([what, *stacks]))

    @property
    def is_alive(self) -> bool:
        return all(rank.process.is_alive() for rank in self.ranks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.join()
            rank.connection.close()


_pools: dict[tuple[int, str], RankPool] = {}


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: str | None = None,
) -> list[Any]:
    """Call `function(rank, *args)` on `world_size` ranks; return the results, by rank. See `RankPool.run`.

    Args:
        world_size: Number of ranks.
        function: A function of a test module.
        args: Arguments of the function after the rank.
        timeout_s: Seconds until the ranks are killed.
        device: Device type of the ranks; by default pytest's --device.
    """
    device = device or device_type()
    if missing := missing_for(device, world_size):
        import pytest

        pytest.skip(missing)
    pool = _pools.get((world_size, device))
    if pool is None or not pool.is_alive:
        if pool is not None:
            pool.close()
        pool = _pools[world_size, device] = RankPool(world_size, device)
    return pool.run(function, *args, timeout_s=timeout_s)


def close_pools() -> None:
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def _serve(rank: int, world_size: int, device: str, connection: Connection, stack_file: str) -> None:
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(file=stacks)  # writes the stack of a segmentation fault
        os.environ["TORCH_FR_BUFFER_SIZE"] = TRACE_BUFFER_SIZE
        os.environ["KINETO_LOG_LEVEL"] = "6"  # no line per profile
        set_device_type(device)
        import torch

        torch.set_num_threads(1)
        prepare(device, rank)
        while True:
            try:
                store, source, name, args = connection.recv()
            except EOFError:
                return
            try:
                reply = ("ok", *_run_one(rank, world_size, store, source, name, args))
            except BaseException:
                reply = ("error", traceback.format_exc(), None)
            connection.send(reply)


def _run_one(rank: int, world_size: int, store: str | None, source: str, name: str, args: Any) -> Any:
    import torch
    import torch.distributed as dist

    import compile_fsdp
    from compile_fsdp.backend import agreement
    from helpers.ranks.meshes import group_count

    function = getattr(_load(source), name)
    torch._dynamo.reset()
    compile_fsdp.reset_reports()
    leave_to_rest()
    if store is not None:
        _meet(rank, world_size, store)
    agreement._agreed.clear()
    world = dist.group.WORLD
    try:
        # Otherwise a rank without collectives could close its connections while the remaining ranks still connect.
        dist.barrier()
        result = function(rank, *args)
        alone = dist.group.WORLD is world and dist.get_pg_count() == 1 + group_count()
        return result, _Left(alone, sum(each.rounds for each in agreement._agreed.values()))
    finally:
        torch.manual_seed(0)
        forget_meshes()
        if device_type() != "cpu":
            # Otherwise the next function could allocate memory that a stream of this function still reads.
            torch.get_device_module(device_type()).synchronize()


def _meet(rank: int, world_size: int, store: str) -> None:
    """Create the ranks' process group.

    Called once, and again only after a test that failed or created groups: code compiled by Dynamo keeps its process
    groups forever, and the threads of hundreds of groups would each wake a hundred times a second.
    """
    import torch
    import torch.distributed as dist

    from compile_fsdp.tools.train.world import backends_of

    if dist.is_initialized():
        dist.destroy_process_group()
    backend = backends_of(torch.device(device_type()))
    dist.init_process_group(backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)


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
        spec = importlib.util.spec_from_file_location(name, source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
