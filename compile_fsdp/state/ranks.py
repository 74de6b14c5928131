"""Make decisions on all ranks together; without a process group, this process is the only rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from compile_fsdp.errors import CheckpointError, CompileFSDPError

T = TypeVar("T")


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather the values of all ranks on every rank, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def unite(texts: Iterable[str]) -> list[str]:
    """The distinct texts of all ranks, sorted."""
    return sorted({text for theirs in gather(list(texts)) for text in theirs})


def on_first(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 only; every rank returns its result or raises its error.

    Raises:
        CompileFSDPError: the function raised this error. Any other exception becomes a `CheckpointError`.
    """
    outcome: list[Any] = [None, None]
    if is_first():
        try:
            outcome[0] = function()
        except CompileFSDPError as error:
            outcome[1] = error
        except Exception as error:
            outcome[1] = CheckpointError(f"{type(error).__name__}: {error}")
            outcome[1].__cause__ = error
    if dist.is_initialized():
        message = None if outcome[1] is None else (type(outcome[1]), str(outcome[1]))
        carried = [outcome[0], message]
        dist.broadcast_object_list(carried, src=0)
        if not is_first():
            kind_and_text = carried[1]
            outcome = [carried[0], None if kind_and_text is None else kind_and_text[0](kind_and_text[1])]
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result
