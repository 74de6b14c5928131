"""No garbage collection while the compiler traces.

[Note: What a trace makes stays]
A trace makes millions of objects that live as long as what is compiled, or until its end. Python's collector goes
through all of them again and again and finds next to nothing: a sixth of a first step of 24 blocks (2026-11-24).
"""

from __future__ import annotations

import gc

from compile_fsdp.runtime.tracing import at_run_time


@at_run_time
def pause_collection() -> bool:
    """Keep the collector from running by itself; whether that is to be undone with `gc.enable()`."""
    was_on = gc.isenabled()
    gc.disable()
    return was_on
