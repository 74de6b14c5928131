"""What a check has found: a row of the table."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.Enum):
    """How a check has ended; only faults count for the exit status."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"
    UNCHECKED = "unchecked"
    """Not looked at, because of a fault above."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one check.

    Attributes:
        state: How it has ended.
        found: What was found, in one line.
        remedy: What to do about it; "" if there is nothing to do.
    """

    state: State
    found: str
    remedy: str = ""
