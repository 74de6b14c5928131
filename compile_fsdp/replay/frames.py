"""A traced frame, ready to be replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from compile_fsdp.replay.conditions import Conditions, Watch
from compile_fsdp.replay.paths import Scope

_MOST_FAILURES = 8


@dataclass(eq=False)
class Frame:
    """The compiled code of a frame, with conditions for running it."""

    run: FunctionType  # of the frame's arguments
    conditions: Conditions
    inputs: frozenset[str]  # names of arguments whose object changes every step
    problem: str | None = None  # why the code could not run at the last check of all conditions; None if it could
    runs: int = 0
    _watch: Watch | None = None
    _failures: int = 0

    def fits(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the code may run now with these arguments."""
        scope: Scope = {"L": arguments, "G": self.run.__globals__}
        if self._watch is not None and self._watch.holds(scope):
            return True
        if self._failures >= _MOST_FAILURES:
            return False  # until the objects seen last return
        self.problem = self.conditions.problem(scope)
        if self.problem is not None:
            self._failures += 1
            return False
        self._failures = 0
        self._watch = Watch(self.conditions, scope, self.inputs, self._watch)
        return True
