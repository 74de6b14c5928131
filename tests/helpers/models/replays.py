"""Counts of replayed steps."""

from __future__ import annotations

from typing import Any


def count_replays(model: Any) -> tuple[int, int]:
    """Number of replayed forwards and of replayed backwards of a compiled model."""
    steps = model._compile_fsdp_hooks.hooks.root.replay.steps
    return sum(step.forward.runs for step in steps), sum(step.backward.frame.runs for step in steps)
