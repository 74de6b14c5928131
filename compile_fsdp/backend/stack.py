"""Find a function on a thread's stack."""

from __future__ import annotations

import sys
from types import CodeType


def runs_below(code: CodeType | None, thread: int) -> bool:
    """Return whether a function's frame is on a thread's stack; False for None, a function nobody has imported.

    Callers pass the thread of the forward, because a backward may run on a thread of the autograd engine.
    """
    frame = None if code is None else sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
