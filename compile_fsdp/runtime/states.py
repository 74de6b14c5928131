"""The states of a parameter group and the steps between them. See docs/states.md.

[Note: States that Dynamo guards]
Traced code takes the states to compare with from its group, `group.known`, and not from this module. Dynamo knows an
object that it meets twice, and guards that both places hold the same one; but not if one place is a global and the
other belongs to an argument. A group's state that equals a global met before would have no guard at all, and the graph
would run again when the group is in another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compile_fsdp.compat import ShardedState, runs_while_tracing

if TYPE_CHECKING:
    from compile_fsdp.runtime.group import TraceableGroup


class KnownStates:
    """torch's states, for groups to refer to."""

    def __init__(self) -> None:
        self.sharded = ShardedState.SHARDED
        self.post_forward = ShardedState.SHARDED_POST_FORWARD
        self.unsharded = ShardedState.UNSHARDED


KNOWN = KnownStates()

LEGAL = (
    (KNOWN.sharded, KNOWN.unsharded),
    (KNOWN.unsharded, KNOWN.sharded),
    (KNOWN.unsharded, KNOWN.post_forward),
    (KNOWN.post_forward, KNOWN.unsharded),
    (KNOWN.post_forward, KNOWN.sharded),
)


def enter(group: TraceableGroup, state: ShardedState) -> None:
    """Take a group to another state."""
    _check(group.group._sharded_state, state)
    group.group._sharded_state = state


@runs_while_tracing
def _check(before: ShardedState, after: ShardedState) -> None:
    assert (before, after) in LEGAL, "an illegal step of a parameter group's state"


def params_follow(group: TraceableGroup) -> None:
    """Take a group's parameters to its state.

    Their states are for code outside of graphs. Dynamo takes milliseconds for each, so a backward that shards again
    what it has unsharded leaves them alone.
    """
    state = group.group._sharded_state
    for each in group.params:
        each.param.sharded_state = state
