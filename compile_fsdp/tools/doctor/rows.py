"""Rows of the doctor's table."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.Enum):
    """Outcome of a check; only faults count for the exit status."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"
    UNCHECKED = "unchecked"  # because of a fault above


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one check."""

    state: State
    found: str  # one line
    remedy: str = ""  # empty if there is nothing to do
