"""The states of a parameter group and the steps between them. See docs/states.md."""

from __future__ import annotations

from compile_fsdp.compat import FSDPParamGroup, ShardedState

SHARDED, POST_FORWARD, UNSHARDED = ShardedState.SHARDED, ShardedState.SHARDED_POST_FORWARD, ShardedState.UNSHARDED

LEGAL = (
    (SHARDED, UNSHARDED),
    (UNSHARDED, SHARDED),
    (UNSHARDED, POST_FORWARD),
    (POST_FORWARD, UNSHARDED),
    (POST_FORWARD, SHARDED),
)


def enter(group: FSDPParamGroup, state: ShardedState) -> None:
    """Take a group and all of its parameters to another state.

    Run while a step is traced, so that the check costs nothing when the graph runs.
    """
    assert (group._sharded_state, state) in LEGAL, "an illegal step of a parameter group's state"
    group._sharded_state = state
    for param in group.fsdp_params:
        param.sharded_state = state
