"""What is being traced right now: the sharded modules whose hooks one Dynamo trace goes through.

Dynamo's own lock serialises tracing, so one record is enough. The backend takes it when the trace ends. A trace
that fails leaves its record behind; the next one starts a new record, known by its tracing context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.dynamo import tracing_context

if TYPE_CHECKING:
    from compile_fsdp.runtime.hooks import StateHooks


class TraceRecord:
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


_record = TraceRecord()


@at_run_time
def enter(hooks: StateHooks) -> None:
    """The pre-forward hook of a module is traced."""
    record = _current()
    record.stack.append(hooks)
    record.entered[hooks] = None


@at_run_time
def leave(hooks: StateHooks, has_backward: bool) -> tuple[StateHooks | None, bool]:
    """A forward has ended, with a backward or without.

    Returns:
        The one with a backward that ended before it in this trace, None if there is none; and whether it has begun in
        this trace.
    """
    record = _current()
    previous = record.last_left
    record.left[hooks] = None
    if has_backward:
        record.last_left = hooks
    if hooks in record.stack:
        del record.stack[record.stack.index(hooks) :]
    return previous, hooks in record.entered


@at_run_time
def _current() -> TraceRecord:
    global _record
    context = tracing_context()
    if _record.context is not context:
        _record = TraceRecord(context)
    return _record


@at_run_time
def take() -> TraceRecord:
    """End the record of the current trace, empty if no sharded module took part, and return it."""
    global _record
    ended, _record = _current(), TraceRecord()
    return ended


@at_run_time
def abandon() -> StateHooks | None:
    """Forget the record of a trace that failed; the innermost module that it was in."""
    global _record
    ended, _record = _record, TraceRecord()
    return ended.stack[-1] if ended.stack else None
