"""Unshard, before a backward graph runs, what it reads and does not gather itself.

[Note: Reads without a gather]
A pre-backward hook gathers a module before its gradients are computed. A module whose output gets no gradient has
none, frozen first layers for example; but its forward may still run again in the backward, for an activation checkpoint
that begins with it. Whether it does is known once the backward graph is there. The pass `save_frozen_outputs` keeps
AOTAutograd's partitioner from computing frozen layers again unasked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from compile_fsdp.runtime.attached import owner_of
from compile_fsdp.runtime.group import TraceableGroup


class UnshardBeforeRun:
    """A compiled backward graph before which some parameter groups are gathered, unless they are there already.

    Attributes:
        run: The compiled graph.
        positions: Of parameters of these groups among the graph's inputs; items of a list count one by one.
    """

    def __init__(self, run: Callable[..., Any], positions: Sequence[int]) -> None:
        self.run = run
        self.positions = positions

    def __call__(self, *args: Any) -> Any:
        flat = [each for arg in args for each in (arg if isinstance(arg, list) else (arg,))]
        unsharded = _unshard(owner_of(flat[position]) for position in self.positions)
        del flat  # The graph frees what it takes from the list; these references would keep it.
        try:
            return self.run(*args)
        finally:
            for group in unsharded:
                if group.fsdp_group.reshard_after_backward:
                    group.fsdp_group.reshard()


def unshard_inputs(inputs: Iterable[Any]) -> None:
    """Gather all that a backward may read that runs op by op: no pass has put its reads behind the hooks that gather.

    The hooks free each group as usual; torch frees what has none at the end of the backward.
    """
    _unshard(map(owner_of, inputs))


def _unshard(groups: Iterable[TraceableGroup | None]) -> list[TraceableGroup]:
    unfilled = [group for group in dict.fromkeys(groups) if group is not None and not group.is_filled]
    for group in unfilled:
        group.unshard_now()
    return unfilled
