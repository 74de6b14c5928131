"""Mutants of the passes that no test can tell from the passes, by `Mutant.key`, each with the reason."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}
