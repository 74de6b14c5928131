"""The states of a parameter group and the steps between them. See docs/states.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compile_fsdp.compat import ShardedState

if TYPE_CHECKING:
    from compile_fsdp.runtime.group import TraceableGroup

SHARDED, POST_FORWARD, UNSHARDED = ShardedState.SHARDED, ShardedState.SHARDED_POST_FORWARD, ShardedState.UNSHARDED

LEGAL = (
    (SHARDED, UNSHARDED),
    (UNSHARDED, SHARDED),
    (UNSHARDED, POST_FORWARD),
    (POST_FORWARD, UNSHARDED),
    (POST_FORWARD, SHARDED),
)


def enter(group: TraceableGroup, state: ShardedState) -> None:
    """Take a group to another state.

    Run while a step is traced, so that the check costs nothing when the graph runs.
    """
    assert (group.group._sharded_state, state) in LEGAL, "an illegal step of a parameter group's state"
    group.group._sharded_state = state


def params_follow(group: TraceableGroup) -> None:
    """Take a group's parameters to its state.

    Their states are for code outside of graphs. Dynamo takes milliseconds for each, so a backward that shards again
    what it has unsharded leaves them alone.
    """
    state = group.group._sharded_state
    for each in group.params:
        each.param.sharded_state = state
