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
    """Take a group, whose parameters have taken it already, to another state.

    Run while a step is traced, so that its checks cost nothing when the graph runs.
    """
    assert (group._sharded_state, state) in LEGAL, "an illegal step of a parameter group's state"
    for param in group.fsdp_params:
        assert param.sharded_state is state, "a parameter's state differs from its group's"
    group._sharded_state = state
