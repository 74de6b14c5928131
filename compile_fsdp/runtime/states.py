"""States of a parameter group and the steps between them. See docs/architecture.md.

[Note: States that Dynamo guards]
Traced code compares with the states in `group.known`, not with globals of this module. If Dynamo meets an object in two
places, it guards that both places hold that object, but not if a global and an argument hold it. A group's state that
equals a global met before would have no guard at all, and the graph would also run when the group is in a different
state.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from compile_fsdp.runtime.tracing import at_run_time, eval_at_trace_time
from compile_fsdp.torch_compat.fsdp import ShardedState

if TYPE_CHECKING:
    from compile_fsdp.runtime.group import TraceableGroup


class ModulesHold(Enum):
    """Parameters of a group that its modules hold, as `nn.Module` attributes."""

    BY_STATE = auto()
    """Those that belong to the group's state."""

    UNTIL_RESTORED = auto()
    """The unsharded ones until the forward ends; then those that they held before it."""

    SHARDED = auto()
    """The sharded ones, although the group is unsharded: nothing in this backward looks at them."""


class KnownStates:
    """States that traced code compares with. See [Note: States that Dynamo guards].

    Attributes:
        sharded, post_forward, unsharded: torch's states of a group.
        by_state, until_restored, modules_sharded: Members of `ModulesHold`.
    """

    def __init__(self) -> None:
        self.sharded = ShardedState.SHARDED
        self.post_forward = ShardedState.SHARDED_POST_FORWARD
        self.unsharded = ShardedState.UNSHARDED
        self.by_state = ModulesHold.BY_STATE
        self.until_restored = ModulesHold.UNTIL_RESTORED
        self.modules_sharded = ModulesHold.SHARDED


KNOWN = KnownStates()

LEGAL = (
    (KNOWN.sharded, KNOWN.unsharded),
    (KNOWN.unsharded, KNOWN.sharded),
    (KNOWN.unsharded, KNOWN.post_forward),
    (KNOWN.post_forward, KNOWN.unsharded),
    (KNOWN.post_forward, KNOWN.sharded),
)


def enter(group: TraceableGroup, state: ShardedState) -> None:
    """Move a group to a state, which must be a legal step."""
    _check(group.fsdp_group._sharded_state, state)
    group.fsdp_group._sharded_state = state


@eval_at_trace_time
def _check(before: ShardedState, after: ShardedState) -> None:
    assert (before, after) in LEGAL, "an illegal step of a parameter group's state"


@at_run_time
def reset(group: TraceableGroup) -> None:
    """Move a group and its parameters to SHARDED after an exception, from any state."""
    group.fsdp_group._sharded_state = KNOWN.sharded
    for param in group.params:
        param.fsdp_param.sharded_state = KNOWN.sharded
