"""States of a parameter group. See docs/architecture.md.

[Note: States that Dynamo guards]
Traced code compares with the states in `group.known`, not with globals of this module. If Dynamo meets an object in two
places, it guards that both places hold that object, but not if a global and an argument hold it. A group's state that
equals a global met before would have no guard at all, and the graph would also run when the group is in a different
state.
"""

from __future__ import annotations

from enum import Enum, auto

from compile_fsdp.torch_compat.fsdp import ShardedState


class Memory(Enum):
    """Memory of a group's parameters beside their shards. `TraceableGroup.enter` alone changes it in this project."""

    SHARDED = auto()
    """None."""

    GATHERING = auto()
    """An all-gather in flight. For torch the group is still sharded."""

    UNSHARDED = auto()
    """The unsharded parameters."""

    UNSHARDED_AHEAD = auto()
    """The unsharded parameters, gathered by eager code ahead of a forward that has not begun."""

    POST_FORWARD = auto()
    """The larger shards over the smaller mesh of `reshard_after_forward=<int>`."""


_UNSHARDED = (Memory.UNSHARDED, Memory.UNSHARDED_AHEAD)

# The states from which a group enters each state.
LEGAL: dict[Memory, tuple[Memory, ...]] = {
    Memory.SHARDED: (Memory.GATHERING, *_UNSHARDED, Memory.POST_FORWARD),
    Memory.GATHERING: (Memory.SHARDED, Memory.POST_FORWARD),
    Memory.UNSHARDED: (Memory.SHARDED, Memory.GATHERING, *_UNSHARDED, Memory.POST_FORWARD),
    Memory.UNSHARDED_AHEAD: _UNSHARDED,
    Memory.POST_FORWARD: (Memory.GATHERING, *_UNSHARDED),
}


class KnownStates:
    """States that traced code compares with. See [Note: States that Dynamo guards].

    Attributes:
        sharded, post_forward, unsharded: torch's states of a group.
    """

    def __init__(self) -> None:
        self.sharded = ShardedState.SHARDED
        self.post_forward = ShardedState.SHARDED_POST_FORWARD
        self.unsharded = ShardedState.UNSHARDED


KNOWN = KnownStates()
