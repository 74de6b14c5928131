"""What is being traced right now: the sharded modules whose hooks one Dynamo trace goes through.

Dynamo's own lock serialises tracing, so one record is enough. The backend takes it when the trace ends. A trace
that fails leaves its record behind; the next one starts a new record, known by its tracing context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compile_fsdp.compat import tracing_context

if TYPE_CHECKING:
    from compile_fsdp.runtime.hooks import StateHooks


class TraceScope:
    """Modules in the order in which one trace met them.

    Attributes:
        context: Dynamo's tracing context, which is one object per attempt to trace a frame.
        stack: Modules that were entered and not left, the innermost last.
        entered: Modules whose pre-forward hook was traced.
        left: Modules whose post-forward hook, and with it the pre-backward hook, was traced.
        last_left: The module with a backward whose post-forward hook was traced last.
    """

    def __init__(self, context: object = None) -> None:
        self.context = context
        self.stack: list[StateHooks] = []
        self.entered: dict[StateHooks, None] = {}
        self.left: dict[StateHooks, None] = {}
        self.last_left: StateHooks | None = None


_scope = TraceScope()


def enter(hooks: StateHooks) -> None:
    scope = _current()
    scope.stack.append(hooks)
    scope.entered[hooks] = None


def leave(hooks: StateHooks, has_backward: bool) -> tuple[StateHooks | None, bool]:
    """Record that a forward has ended, and whether it has a backward.

    Returns:
        The one with a backward that ended before it in this trace, None if there is none; and whether it has begun in
        this trace.
    """
    scope = _current()
    previous = scope.last_left
    scope.left[hooks] = None
    if has_backward:
        scope.last_left = hooks
    if hooks in scope.stack:
        del scope.stack[scope.stack.index(hooks) :]
    return previous, hooks in scope.entered


def _current() -> TraceScope:
    global _scope
    context = tracing_context()
    if _scope.context is not context:
        _scope = TraceScope(context)
    return _scope


def take() -> TraceScope:
    """End the record of the current trace, empty if no sharded module took part, and return it."""
    global _scope
    ended, _scope = _current(), TraceScope()
    return ended


def abandon() -> StateHooks | None:
    """Forget the record of a trace that failed; the innermost module that it was in."""
    global _scope
    ended, _scope = _scope, TraceScope()
    return ended.stack[-1] if ended.stack else None
