"""Kill rank processes at chosen stages of a save."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from compile_fsdp.state import async_save, checkpoint, find_latest, load, save
from compile_fsdp.tools.launch import Ranks, join
from helpers.models.optimizers import train, trained
from helpers.ranks.forked import forkserver, to_the_end

# Stages of a save. Rank 0 puts files in place, so at the last three stages rank 0 kills the victim.
STAGES = (
    "before the write",
    "in the middle of the write",
    "before the rename",
    "before the marker",
    "after the marker",
)
WORLD_SIZE = 2
PATIENCE_S = 60.0


def train_one_step_and_save(folder: Path, stage: str | None, victim: int, in_background: bool) -> list[int | None]:
    """Resume on new ranks, kill the victim during the save, and return the exit codes by rank."""
    ranks = Ranks(WORLD_SIZE, forkserver())
    try:
        ranks.begin(to_the_end, _resume, str(folder), stage, victim, in_background)
        deadline = time.monotonic() + PATIENCE_S
        for process in ranks.processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        ranks.kill()
    return [process.exitcode for process in ranks.processes]


def _resume(rank: int, folder: str, stage: str | None, victim: int, in_background: bool) -> None:
    torch.set_num_threads(1)
    join(torch.device("cpu"))
    model, optim = trained(0, init_device_mesh("cpu", (WORLD_SIZE,)))
    step = 0 if find_latest(folder) is None else load(model, optim, folder)
    train(model, optim, [step])
    pids: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(pids, os.getpid())

    def kill() -> None:
        os.kill(pids[victim], signal.SIGKILL)

    if stage is not None:
        _arm(stage, rank, victim, kill)
    if in_background:
        async_save(model, optim, folder, step + 1).wait()
    else:
        save(model, optim, folder, step + 1)


def _arm(stage: str, rank: int, victim: int, kill: Callable[[], None]) -> None:
    """Arrange a call of `kill` at this stage of the process's next save."""
    if stage == "before the write" and rank == victim:
        _before(checkpoint, "write_tensors", lambda *_: True, kill)
        _before(checkpoint, "async_save_tensors", lambda *_: True, kill)
    elif stage == "in the middle of the write" and rank == victim:
        calls: list[None] = []

        def is_fifth(value: Any, file: Any, *_: Any) -> bool:
            calls.append(None)
            file.flush()
            return len(calls) == 5

        _before(torch, "save", is_fifth, kill)
    elif stage == "before the rename" and rank == 0:
        _before(os, "rename", lambda _, target: Path(target).name.startswith("step-"), kill)
    elif stage == "before the marker" and rank == 0:
        _before(os, "replace", lambda _, target: Path(target).name == "latest", kill)
    elif stage == "after the marker" and rank == 0:
        replace = os.replace

        def replace_and_kill(source: Any, target: Any) -> None:
            replace(source, target)
            kill()

        os.replace = replace_and_kill  # type: ignore[assignment]


def _before(owner: Any, name: str, condition: Callable[..., bool], kill: Callable[[], None]) -> None:
    """Call `kill` before calls of `owner.name` with arguments that meet the condition."""
    original = getattr(owner, name)

    def armed(*args: Any, **kwargs: Any) -> Any:
        if condition(*args):
            kill()
        return original(*args, **kwargs)

    setattr(owner, name, armed)
