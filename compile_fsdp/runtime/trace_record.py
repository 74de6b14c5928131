"""Record of the running Dynamo trace: the sharded modules whose hooks it goes through.

Dynamo's own lock serialises tracing, so one record is enough. A failed trace leaves its record behind. The next trace
has a different tracing context, and so starts a new record.
"""

from __future__ import annotations

from compile_fsdp.runtime.root import StateHooks
from compile_fsdp.runtime.tracing import at_run_time
from compile_fsdp.torch_compat.dynamo import tracing_context


class TraceRecord:
    """Modules in the order in which one trace meets them."""

    def __init__(self, context: object = None) -> None:
        self.context = context  # Dynamo's tracing context, one object for each attempt to trace a frame
        self.stack: list[StateHooks] = []  # modules entered but not left, the innermost last
        self.entered: dict[StateHooks, None] = {}  # modules whose pre-forward hook is traced
        self.left: dict[StateHooks, None] = {}  # modules whose post-forward hook is traced
        self.last_left: StateHooks | None = None  # the last module in `left` with a backward


_record = TraceRecord()


@at_run_time
def enter(hooks: StateHooks) -> None:
    """Record that Dynamo traces the pre-forward hook of a module."""
    record = _current()
    record.stack.append(hooks)
    record.entered[hooks] = None


@at_run_time
def leave(hooks: StateHooks, has_backward: bool) -> tuple[StateHooks | None, bool]:
    """Record that a forward ends; return `last_left` before it, and whether this forward began in this trace."""
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
    """Discard the record of a failed trace; return the innermost module that it had entered, or None.

    Modules that share hooks are left out, because the hooks end their forward only after the last of the modules: the
    failed code may be behind the first.
    """
    global _record
    ended, _record = _record, TraceRecord()
    return next((hooks for hooks in reversed(ended.stack) if len(hooks.members) == 1), None)
