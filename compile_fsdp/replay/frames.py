"""One frame that was traced, ready to run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compile_fsdp.replay.conditions import Conditions, Watch
from compile_fsdp.replay.paths import Scope

_MOST_FAILURES = 8


class Frame:
    """The compiled code of a frame, and when it may run.

    Attributes:
        run: The code, as a function of the frame's arguments.
        conditions: What must hold.
        problem: Why it could not run when that was asked last; None if it could.
        runs: How often it has run.
    """

    def __init__(
        self, run: Callable[..., Any], conditions: Conditions, variables: Mapping[str, Any], inputs: frozenset[str]
    ) -> None:
        """Args:
        run: See above.
        conditions: See above.
        variables: The globals of the code.
        inputs: Names of arguments that are other objects in each step.
        """
        self.run = run
        self.conditions = conditions
        self.problem: str | None = None
        self.runs = 0
        self._variables = variables
        self._inputs = inputs
        self._watch: Watch | None = None
        self._failures = 0

    def fits(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the code is right for these arguments, now."""
        scope: Scope = {"L": arguments, "G": self._variables}
        if self._watch is not None and self._watch.holds(scope):
            return True
        if self._failures >= _MOST_FAILURES:
            return False  # until what the watch has seen last is back
        self.problem = self.conditions.problem(scope)
        if self.problem is not None:
            self._failures += 1
            return False
        self._failures = 0
        self._watch = Watch(self.conditions, scope, self._inputs, self._watch)
        return True
