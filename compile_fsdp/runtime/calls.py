"""The calls of sharded modules that run now, for what has to see one from its inputs to its outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(eq=False, slots=True)
class Call:
    """One call.

    Attributes:
        module: What is called.
        args: With what.
        kwargs: And with what by name.
        forward_id: Tells this call from every other.
        on_output: Gets what it returns, if set in the meantime.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    forward_id: object = field(default_factory=object)
    on_output: Callable[[Any], None] | None = None


class _Running(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


_running = _Running()


def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    call = Call(module, args, kwargs)
    _running.calls.append(call)
    return call


def end() -> None:
    _running.calls.pop()


def outermost() -> Call | None:
    """The call that was begun first."""
    return _running.calls[0] if _running.calls else None
