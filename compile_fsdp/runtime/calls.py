"""The calls of sharded modules that run now, for what has to see one from its inputs to its outputs."""

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
        forward_id: Tells this call from every other.
        on_output: Gets the module's output, if set while the call runs.
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
    """A call starts."""
    call = ModuleCall(module, args, kwargs)
    _running.calls.append(call)
    return call


@at_run_time
def end() -> None:
    """The call that was begun last is over."""
    _running.calls.pop()


@at_run_time
def outermost() -> ModuleCall | None:
    """The call that was begun first."""
    return _running.calls[0] if _running.calls else None
