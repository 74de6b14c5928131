"""Run an eager function on ranks that are threads of this process."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from helpers.ranks.pools import DEFAULT_TIMEOUT_S, RankError, RankTimeout, forget_meshes


def run_threads(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """Call `function(rank, *args)` on ranks that are threads; return the results, by rank.

    Starts at once and accepts any function. For eager code only, because the threads share Dynamo and torch's random
    number generator.

    Raises:
        RankError: if a rank raises.
        RankTimeout: if a rank does not return within `timeout_s` seconds.
    """
    results: dict[int, Any] = {}
    errors: list[str] = []
    store = dist.HashStore()
    abandoned = threading.Event()

    def serve(rank: int) -> None:
        dist.init_process_group("threaded", store=store, rank=rank, world_size=world_size)
        try:
            results[rank] = function(rank, *args)
        except BaseException as error:
            errors.append(f"rank {rank}:\n{traceback.format_exc()}")
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)  # wakes ranks that wait for this rank
        finally:
            if not abandoned.is_set():
                dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stacks = sys._current_frames()
        waiting = [
            f"rank {rank} was at:\n{''.join(traceback.format_stack(stacks[thread.ident or 0]))}"
            for rank, thread in enumerate(threads)
            if thread.is_alive()
        ]
    finally:
        abandoned.set()
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        forget_meshes()
    if errors:
        raise RankError("\n".join(errors))
    if waiting:
        raise RankTimeout("\n".join([f"not finished after {timeout_s:.0f} s", *waiting]))
    return [results[rank] for rank in range(world_size)]
