"""Replay of steps without a bundle, and counts of replayed steps."""

from __future__ import annotations

from typing import Any

from compile_fsdp.options import Options
from compile_fsdp.replay.model import ModelReplay, show_guards
from compile_fsdp.torch_compat.dynamo import CAN_REPLAY


def compile_with_replay(model: Any, **arguments: Any) -> None:
    """Compile a model for steps that are replayed in this process, as steps from a bundle are, with any inner backend.

    Without replay before torch 2.13. `arguments`: those of torch.compile; the options have no bundle.
    """
    model.compile(**(show_guards(arguments) if CAN_REPLAY else arguments))
    if CAN_REPLAY:
        model._compile_fsdp_hooks.hooks.root.replay = ModelReplay(Options.parse(arguments["options"]), has_bundle=False)


def count_replays(model: Any) -> tuple[int, int]:
    """Number of replayed forwards and of replayed backwards of a compiled model."""
    steps = model._compile_fsdp_hooks.hooks.root.replay.steps
    known = [each for _, step in steps for each in step.known]
    return sum(forward.runs for forward, _ in steps), sum(each.frame.runs for each in known)
