"""Unshard parameters that a backward graph reads and does not gather.

[Note: Reads without a gather]
A pre-backward hook gathers a module before its gradients are computed. A module whose output gets no gradient has no
such hook, for example a frozen first layer. Its forward may still run again in the backward, if an activation
checkpoint begins with it. Only the backward graph shows whether it does. The pass `save_frozen_outputs` keeps
AOTAutograd's partitioner from computing frozen layers again unasked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from compile_fsdp.runtime.attached import owner_of
from compile_fsdp.runtime.group import TraceableGroup


def unshard_before_run(run: Callable[..., Any], positions: Sequence[int]) -> Callable[..., Any]:
    """Let a compiled backward graph first gather parameter groups, unless they are already gathered.

    `positions`: of these groups' parameters in the graph's inputs; each item of a list counts.
    """

    def run_unsharded(*args: Any) -> Any:
        unsharded = unshard(owners_of(args, positions))
        try:
            return run(*args)
        finally:
            for group in unsharded:
                if group.fsdp_group.reshard_after_backward:
                    group.fsdp_group.reshard()

    return run_unsharded


def owners_of(args: Sequence[Any], positions: Iterable[int]) -> list[TraceableGroup]:
    """Return the groups of a graph's inputs at these positions, at which each item of a list counts."""
    flat = [each for arg in args for each in (arg if isinstance(arg, list) else (arg,))]
    owners = dict.fromkeys(owner_of(flat[position]) for position in positions)
    return [group for group in owners if group is not None]


def unshard(groups: Iterable[TraceableGroup | None]) -> list[TraceableGroup]:
    """Gather the groups that are not gathered, and return them."""
    unfilled = [group for group in dict.fromkeys(groups) if group is not None and not group.is_unsharded]
    for group in unfilled:
        group.unshard_now()
    return unfilled
