"""Running calls of sharded modules, for code that follows a call from inputs to outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from compile_fsdp.runtime.tracing import at_run_time, inline_only


@dataclass(eq=False, slots=True)
class ModuleCall:
    """One call of a sharded module.

    Attributes:
        module: The module.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        forward_id: Unique object that identifies this call.
        on_output: Function that gets the module's output, if set while the call runs; else None.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    forward_id: object = field(default_factory=object)
    on_output: Callable[[Any], None] | None = None


inline_only(ModuleCall.__init__)


class _Running(threading.local):
    def __init__(self) -> None:
        self.calls: list[ModuleCall] = []


_running = _Running()


@at_run_time
def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleCall:
    """Record the start of a call."""
    call = ModuleCall(module, args, kwargs)
    _running.calls.append(call)
    return call


@at_run_time
def end() -> None:
    """Record the end of the call that began last."""
    _running.calls.pop()


@at_run_time
def outermost() -> ModuleCall | None:
    """Return this thread's call that began first, or None outside of a call."""
    return _running.calls[0] if _running.calls else None
