"""A traced frame, ready to be replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compile_fsdp.replay.conditions import Conditions, Watch
from compile_fsdp.replay.paths import Scope

_MOST_FAILURES = 8


class Frame:
    """The compiled code of a frame, with conditions for running it.

    Attributes:
        run: The code, as a function of the frame's arguments.
        conditions: Conditions that must hold.
        problem: Why the code could not run at the last check of all conditions; None if it could.
        runs: Number of runs.
    """

    def __init__(
        self, run: Callable[..., Any], conditions: Conditions, variables: Mapping[str, Any], inputs: frozenset[str]
    ) -> None:
        """Take the code and its conditions.

        Args:
            run: See above.
            conditions: See above.
            variables: Globals of the code.
            inputs: Names of arguments whose object changes every step.
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
        """Return whether the code may run now with these arguments."""
        scope: Scope = {"L": arguments, "G": self._variables}
        if self._watch is not None and self._watch.holds(scope):
            return True
        if self._failures >= _MOST_FAILURES:
            return False  # until the objects seen last return
        self.problem = self.conditions.problem(scope)
        if self.problem is not None:
            self._failures += 1
            return False
        self._failures = 0
        self._watch = Watch(self.conditions, scope, self._inputs, self._watch)
        return True
