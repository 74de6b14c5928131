"""How often steps of a model were run again without tracing."""

from __future__ import annotations

from typing import Any


def count_replays(model: Any) -> tuple[int, int]:
    """Forwards and backwards of a compiled model that were run again."""
    steps = model._compile_fsdp_hooks.hooks.root.replay.steps
    return sum(step.forward.runs for step in steps), sum(step.backward.frame.runs for step in steps)
