"""Pause of garbage collection while the compiler traces.

[Note: Objects of a trace stay]
A trace makes millions of objects that live until its end or longer. Python's collector scans them repeatedly and finds
almost no garbage. The scans took a sixth of a first step of 24 blocks (2026-11-24).
"""

from __future__ import annotations

import gc

from compile_fsdp.runtime.tracing import at_run_time


@at_run_time
def pause_collection() -> bool:
    """Disable automatic collection; return whether it was enabled, so that `gc.enable()` must follow."""
    was_on = gc.isenabled()
    gc.disable()
    return was_on
