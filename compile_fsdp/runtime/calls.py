"""Running calls of sharded modules."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from compile_fsdp.runtime.tracing import at_run_time, inline_only


@dataclass(eq=False, slots=True)
class ModuleCall:
    """One call of a sharded module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_outermost: bool  # whether the call is not within a call of a sharded module
    is_first: bool  # whether the call is the first since the model was compiled
    is_eager: bool  # whether a compiled module runs eagerly in this call
    forward_id: object = field(default_factory=object)  # unique object that identifies this call
    on_output: Callable[[Any], None] | None = None  # gets the module's output, if set while the call runs


inline_only(ModuleCall.__init__)


class _Running(threading.local):
    def __init__(self) -> None:
        self.calls: list[ModuleCall] = []


_running = _Running()


@at_run_time
def begin(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_first: bool, is_eager: bool
) -> ModuleCall:
    call = ModuleCall(module, args, kwargs, not _running.calls, is_first, is_eager)
    _running.calls.append(call)
    return call


@at_run_time
def end() -> None:
    _running.calls.pop()


@at_run_time
def outermost() -> ModuleCall | None:
    """Return this thread's call that began first, or None outside of a call."""
    return _running.calls[0] if _running.calls else None
