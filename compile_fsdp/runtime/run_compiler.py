"""Calls during which Python code compiles a model: garbage collection waits, and the stack does not move.

[Note: Objects of a trace stay]
A trace makes millions of objects that live until its end or longer. Python's collector scans them repeatedly and finds
almost no garbage. The scans took a sixth of a first step of 24 blocks (2026-11-24). Dynamo itself collects behind each
trace, and Python would soon do so, too: that took another tenth of a first step of 28 blocks with all kernels cached
(2026-11-30). So the objects of a trace move to the oldest generation, which is collected rarely: the trace's garbage
has 5 MiB for each block, but no tensor.

[Note: One chunk of the stack]
CPython keeps the frames of Python functions in chunks of 16 KiB. In 3.11, 3.12 and later versions without the cure of
github.com/python/cpython/issues/142183, a call that crosses the end of a chunk maps memory for a new one, and its
return unmaps it. A loop at such a depth does so in every call: 700,000 times in a first step of 32 blocks, a fifth of
its time (3.11, 2026-11-29). A frame that is larger than a chunk gets one whose size is the next power of two, and all
calls within use the rest of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from compile_fsdp.runtime.tracing import at_run_time

_Result = TypeVar("_Result")

# Of 8 bytes. The rest of the chunk is as large, and holds as many frames as the default recursion limit allows.
_STACK_SLOTS = 1 << 16


# Of young objects. Fewer do not come from a trace; more than _MANY left by traces are collected at once.
_FEW, _MANY = 50_000, 4_000_000

_left = 0  # objects that traces have left to the oldest generation since the last collection of _MANY


def run_compiler(function: Callable[[], _Result]) -> _Result:
    """Call a function that compiles. Automatic garbage collection is disabled meanwhile."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return function()
    finally:
        _age_objects()
        if was_on:
            gc.enable()


@at_run_time
def _age_objects() -> None:
    """Move the objects of a trace to the oldest generation. See [Note: Objects of a trace stay]."""
    global _left
    young = gc.get_count()[0]
    if young < _FEW or gc.get_freeze_count() > 0:  # frozen by the user, and not to be unfrozen
        return
    gc.freeze()
    gc.unfreeze()
    _left += young
    if _left > _MANY:
        gc.collect()
        _left = 0


run_compiler.__code__ = run_compiler.__code__.replace(co_stacksize=_STACK_SLOTS)
at_run_time(run_compiler)
