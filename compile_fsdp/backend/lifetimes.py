"""Weak references to functions, for tables that are never emptied."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any


def weak_callable(function: Callable[..., Any], otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a caller of a function or bound method that does not keep it alive; calls `otherwise` once it is gone."""
    reference = weakref.WeakMethod(function) if inspect.ismethod(function) else weakref.ref(function)

    def call(*args: Any) -> Any:
        target = reference() or otherwise
        assert target is not None
        return target(*args)

    return call
