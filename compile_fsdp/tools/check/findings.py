"""What `check` finds: one thing about a script, what it costs, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from compile_fsdp.tools.explain.capture import Place


class Level(Enum):
    """How bad a finding is."""

    BREAKS = "breaks"  # the step does not compile whole
    COSTS = "costs"  # it does, and takes more time or memory than it needs
    NOTE = "note"  # something to know about what was checked


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        level: How bad it is.
        rule: A name for what it is, the same in all scripts and versions.
        what: What was found, in a sentence.
        remedy: What to change.
        place: The line of the user's code; None for what no line alone is to blame for.
        names: FQNs of the modules or parameters that it is about.
    """

    level: Level
    rule: str
    what: str
    remedy: str
    place: Place | None = None
    names: tuple[str, ...] = ()


MOST_NAMES = 4


def list_names(names: tuple[str, ...]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
