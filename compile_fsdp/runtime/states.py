"""States of a parameter group. See docs/architecture.md.

[Note: States that Dynamo guards]
Traced code compares with the states in `group.known`, not with globals. If a group's state were equal to a global met
before, Dynamo would not guard it at all, and the graph would also run when the group is in a different state.
"""

from __future__ import annotations

from enum import Enum, auto

from compile_fsdp.torch_compat.fsdp import ShardedState


class Memory(Enum):
    """Memory of a group's parameters beside their shards. `TraceableGroup.enter` alone changes it in this project."""

    SHARDED = auto()  # no memory
    GATHERING = auto()  # an all-gather in flight; for torch the group is still sharded
    UNSHARDED = auto()  # the unsharded parameters
    UNSHARDED_AHEAD = auto()  # the unsharded parameters, gathered by eager code before their forward begins
    POST_FORWARD = auto()  # the larger shards over the smaller mesh of `reshard_after_forward=<int>`


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
    """torch's states, for traced code to compare with. See [Note: States that Dynamo guards]."""

    def __init__(self) -> None:
        self.sharded = ShardedState.SHARDED
        self.post_forward = ShardedState.SHARDED_POST_FORWARD
        self.unsharded = ShardedState.UNSHARDED


KNOWN = KnownStates()
