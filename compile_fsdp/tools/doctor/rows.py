"""Result of a check: a row of the table."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.Enum):
    """Outcome of a check; only faults count for the exit status."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"
    UNCHECKED = "unchecked"
    """Not looked at, because of a fault above."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one check.

    Attributes:
        state: Outcome of the check.
        found: Description of the result, in one line.
        remedy: Advice to the user; "" if there is nothing to do.
    """

    state: State
    found: str
    remedy: str = ""
