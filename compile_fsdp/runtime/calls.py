"""Running calls of sharded modules, and forwards through a group that await their backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

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


class ForwardCall(Protocol):
    """A forward through a compiled graph, as its backward sees it."""

    def is_to_come(self) -> bool:
        """Return whether the running backward has yet to go through this forward."""


class ForwardCalls:
    """Forwards through one group."""

    def __init__(self) -> None:
        self.calls: weakref.WeakSet[ForwardCall] = weakref.WeakSet()  # forwards whose backward may still run
        self.is_cut = False  # whether any compiled graph held only a part of a forward of the group's module
        # By id of an unsharded parameter: number of the last backward in which eager code accumulated its gradient.
        self.from_eager: dict[int, int | None] = {}

    @at_run_time
    def add(self, call: ForwardCall, is_whole: bool) -> None:
        """Record a forward; `is_whole` says whether its graph holds the module's whole forward."""
        self.calls.add(call)
        self.is_cut |= not is_whole
