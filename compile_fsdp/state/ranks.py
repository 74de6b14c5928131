"""Make decisions on all ranks together; without a process group, this process is the only rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

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


def broadcast(value: T) -> T:
    """Return rank 0's value on every rank."""
    carried = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(carried, src=0)
    return carried[0]


def on_first(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 only; every rank returns its result or raises its error, as a `CompileFSDPError`."""
    result: Any = None
    failure: CompileFSDPError | None = None
    if is_first():
        try:
            result = function()
        except CompileFSDPError as error:
            failure = error
        except Exception as error:
            failure = CheckpointError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
    result, failure = broadcast((result, failure))
    if failure is not None:
        raise failure
    return cast(T, result)
