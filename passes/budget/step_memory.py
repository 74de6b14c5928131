"""Values, parameters and groups of a step.

[Note: Bodies of checkpoints]
A user's checkpoint is one op with a body: a graph that runs in the forward, and again in the backward just before the
backward of the body. So a body has its own `Step`. Between forward and backward only the inputs of the op are held. At
both places there is room for the most bytes that the body holds at a time, including the parameters that it gathers.

[Note: Blocks]
A call of a block is one node of a graph: no parameter is gathered or freed within it, and all its gradients exist when
it ends. So each of its parameters is held as if its first and its last op used it. A backward that runs op by op holds
the saved values that it takes until it ends. A backward in two parts (`passes/partitioned/cut_backward.py`) holds less.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from compile_fsdp.passes.budget.op_facts import Kind, OpFacts


@dataclass(eq=False, slots=True)
class Value:
    """Memory that an op of the forward allocates."""

    made_at: int  # position of the op
    size: int  # bytes
    kind: Kind  # of the op
    sources: list[Value]  # that the op takes
    uses: list[int] = field(default_factory=list)  # positions of the ops that take the value
    saved_by: list[int] = field(default_factory=list)  # positions of the ops whose backward needs the value
    needs_grad: bool = False  # the backward computes its gradient
    is_result: bool = False  # the graph returns it
    is_saved: bool = False  # it is kept for the backward
    is_from_checkpoint: bool = False  # a checkpoint that runs again makes it: see [Note: Bodies of checkpoints]

    @property
    def is_at_hand(self) -> bool:
        """Whether the backward has the value without computing it from its sources."""
        return self.is_saved or self.is_from_checkpoint


@dataclass(frozen=True, slots=True)
class Sharding:
    """How an unsharded parameter is sharded."""

    group: int  # number of the group that is gathered with it
    shard_bytes: int  # of its sharded gradient, padding included
    reduced_bytes: int  # of its whole gradient in the dtype of the reduction
    unshards_in_backward: bool = True  # the backward gathers its group if the forward has freed it
    group_name: str = ""  # FQN of the group's module, for reports


@dataclass(eq=False, slots=True)
class Parameter:
    """An unsharded parameter."""

    sharding: Sharding
    needs_grad: bool
    size: int = 0  # bytes of its storage
    uses: list[int] = field(default_factory=list)  # positions of the ops that compute with it
    fills: int = 0  # number of fills


@dataclass(eq=False, slots=True)
class Group:
    """Parameters that are gathered together."""

    number: int
    parameters: list[Parameter] = field(default_factory=list)  # in the graph
    frees: list[fx.Node] = field(default_factory=list)  # empty if the forward leaves the group unsharded
    filled_at: int = 0  # position of the first op behind the fills
    freed_at: int = 0  # position of the first op behind the frees

    @property
    def name(self) -> str:
        """FQN of the group's module."""
        return self.parameters[0].sharding.group_name

    @property
    def size(self) -> int:
        """Bytes of all parameters of the group."""
        return sum(parameter.size for parameter in self.parameters)

    @property
    def unshards_in_backward(self) -> bool:
        return self.parameters[0].sharding.unshards_in_backward

    @property
    def uses(self) -> list[int]:
        return [use for parameter in self.parameters for use in parameter.uses]


@dataclass(frozen=True, slots=True)
class Step:
    """A forward, and the values that its backward needs; see `read_step`."""

    ops: Sequence[fx.Node]  # (n,) nodes that compute, in graph order
    facts: Sequence[OpFacts]  # (n,)
    made: Sequence[Sequence[Value]]  # (n,) memory that each op allocates
    read: Sequence[Sequence[Group]]  # (n,) groups whose parameters each op computes with
    internal: Sequence[int]  # (n,) bytes that each op saves besides inputs and results
    windows: Sequence[Group | None]  # (n,) innermost group that is gathered for each op and freed behind it, if any
    groups: Sequence[Group]  # groups that are read, in the order of their first use
    bodies: Mapping[int, Step]  # of ops that run a graph, by their position: see [Note: Bodies of checkpoints]
    fuses: bool  # values that are fused with their reader take no memory; False for graphs run op by op
    is_body: bool  # the step is a body of a checkpoint
    blocks: Mapping[int, range] = field(default_factory=dict)  # by op, the ops of its block: see [Note: Blocks]

    @property
    def values(self) -> Iterator[Value]:
        return (value for made in self.made for value in made)

    def mirrored(self, position: int) -> int:
        """Return the place of an op's backward."""
        return 2 * len(self.ops) - 1 - position

    def block_at(self, position: int) -> range:
        """Return the positions of the ops of an op's block, or the op's own."""
        return self.blocks.get(position, range(position, position + 1))


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of a step that save memory."""

    kept: Collection[int] = frozenset()  # numbers of the groups that stay unsharded from the forward to the backward
    recomputed: Collection[int] = frozenset()  # positions of the ops that the backward runs again
    has_large_packs: bool = False  # packs of several groups are gathered, and reduced, together
    offloaded: Collection[int] = frozenset()  # positions of the ops whose results wait in host memory
