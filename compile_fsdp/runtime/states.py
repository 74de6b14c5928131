"""The states of a parameter group and the steps between them. See docs/states.md.

[Note: States that Dynamo guards]
Traced code takes the states to compare with from its group, `group.known`, and not from this module. Dynamo knows an
object that it meets twice, and guards that both places hold the same one; but not if one place is a global and the
other belongs to an argument. A group's state that equals a global met before would have no guard at all, and the graph
would run again when the group is in another one.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from compile_fsdp.runtime.tracing import at_run_time, eval_at_trace_time
from compile_fsdp.torch_compat.fsdp import ShardedState

if TYPE_CHECKING:
    from compile_fsdp.runtime.group import TraceableGroup


class ModulesHold(Enum):
    """Which parameters of a group its modules hold, as `nn.Module` attributes."""

    BY_STATE = auto()
    """Those that belong to the group's state."""

    UNTIL_RESTORED = auto()
    """The unsharded ones until the forward ends; then those that they held before it."""

    SHARDED = auto()
    """The sharded ones, although the group is unsharded: nothing in this backward looks at them."""


class KnownStates:
    """What traced code compares with. See [Note: States that Dynamo guards].

    Attributes:
        sharded, post_forward, unsharded: torch's states of a group.
        by_state, until_restored, modules_sharded: What modules hold.
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
    """Take a group to another state."""
    _check(group.fsdp_group._sharded_state, state)
    group.fsdp_group._sharded_state = state


@eval_at_trace_time
def _check(before: ShardedState, after: ShardedState) -> None:
    assert (before, after) in LEGAL, "an illegal step of a parameter group's state"


@at_run_time
def reset(group: TraceableGroup) -> None:
    """Take a group and its parameters to SHARDED, wherever an exception has left them."""
    group.fsdp_group._sharded_state = KNOWN.sharded
    for param in group.params:
        param.fsdp_param.sharded_state = KNOWN.sharded
