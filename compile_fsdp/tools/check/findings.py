"""Findings of `check`: a level, a rule, a description and a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from compile_fsdp.tools.explain.capture import Place


class Level(Enum):
    """Severity of a finding."""

    BREAKS = "breaks"  # the step does not compile whole
    COSTS = "costs"  # the step compiles whole, but takes more time or memory than it needs
    NOTE = "note"  # a remark about the run


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding."""

    level: Level
    rule: str  # name of the kind of finding; stable across scripts and versions
    what: str  # description of the finding, in a sentence
    remedy: str  # change that the user should make
    place: Place | None = None  # None if no single line of the user's code causes the finding
    names: tuple[str, ...] = ()  # FQNs of the modules or parameters that the finding is about
