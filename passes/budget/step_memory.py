"""Values, parameters and groups of a step.

[Note: Bodies of checkpoints]
A user's checkpoint is one op with a body: a graph that runs in the forward, and again in the backward just before the
backward of the body. So a body has its own `Step`. Between forward and backward only the inputs of the op are held. At
both places there is room for the most bytes that the body holds at a time, including the parameters that it gathers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from compile_fsdp.passes.budget.op_facts import Kind, OpFacts


@dataclass(eq=False, slots=True)
class Value:
    """Memory that an op of the forward allocates.

    Attributes:
        made_at: Position of the op.
        size: Bytes.
        kind: Kind of the op.
        sources: Values that the op takes.
        uses: Positions of the ops that take the value.
        saved_by: Positions of the ops whose backward needs the value.
        needs_grad: Whether the backward computes its gradient.
        is_result: Whether the graph returns it.
        is_saved: Whether it is kept for the backward.
        is_from_checkpoint: Whether a checkpoint that runs again makes it: see [Note: Bodies of checkpoints].
    """

    made_at: int
    size: int
    kind: Kind
    sources: list[Value]
    uses: list[int] = field(default_factory=list)
    saved_by: list[int] = field(default_factory=list)
    needs_grad: bool = False
    is_result: bool = False
    is_saved: bool = False
    is_from_checkpoint: bool = False

    @property
    def is_at_hand(self) -> bool:
        """Whether the backward has the value without computing it from its sources."""
        return self.is_saved or self.is_from_checkpoint


@dataclass(frozen=True, slots=True)
class Sharding:
    """How an unsharded parameter is sharded.

    Attributes:
        group: Number of the group that is gathered with it.
        shard_bytes: Bytes of its sharded gradient, padding included.
        reduced_bytes: Bytes of its whole gradient in the dtype of the reduction.
        unshards_in_backward: Whether the backward gathers its group if the forward has freed it.
        group_name: FQN of the group's module, for reports.
    """

    group: int
    shard_bytes: int
    reduced_bytes: int
    unshards_in_backward: bool = True
    group_name: str = ""


@dataclass(eq=False, slots=True)
class Parameter:
    """An unsharded parameter.

    Attributes:
        sharding: How it is sharded.
        needs_grad: Whether it gets a gradient.
        size: Bytes of its storage.
        uses: Positions of the ops that compute with it.
        fills: Number of fills.
    """

    sharding: Sharding
    needs_grad: bool
    size: int = 0
    uses: list[int] = field(default_factory=list)
    fills: int = 0


@dataclass(eq=False, slots=True)
class Group:
    """Parameters that are gathered together.

    Attributes:
        number: Number of the group.
        parameters: Parameters of the group in the graph.
        frees: Ops that free them in the forward; empty if the forward leaves the group unsharded.
        filled_at: Position of the first op behind the fills.
        freed_at: Position of the first op behind the frees.
    """

    number: int
    parameters: list[Parameter] = field(default_factory=list)
    frees: list[fx.Node] = field(default_factory=list)
    filled_at: int = 0
    freed_at: int = 0

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
    """A forward, and the values that its backward needs; see `read_step`.

    Attributes:
        ops: (n,) nodes that compute, in graph order.
        facts: (n,) facts per op.
        made: (n,) memory that each op allocates.
        read: (n,) groups whose parameters each op computes with.
        internal: (n,) bytes that each op saves besides inputs and results.
        windows: (n,) innermost group that is gathered for each op and freed behind it; None outside of such windows.
        groups: Groups that are read, in the order of their first use.
        bodies: By position of an op that runs a graph, the step of that graph: see [Note: Bodies of checkpoints].
        fuses: Whether values that are fused with their reader take no memory; False for graphs run op by op.
        is_body: Whether the step is a body.
    """

    ops: Sequence[fx.Node]
    facts: Sequence[OpFacts]
    made: Sequence[Sequence[Value]]
    read: Sequence[Sequence[Group]]
    internal: Sequence[int]
    windows: Sequence[Group | None]
    groups: Sequence[Group]
    bodies: Mapping[int, Step]
    fuses: bool
    is_body: bool

    @property
    def values(self) -> Iterator[Value]:
        return (value for made in self.made for value in made)

    def mirrored(self, position: int) -> int:
        """Return the place of an op's backward."""
        return 2 * len(self.ops) - 1 - position


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of a step that save memory.

    Attributes:
        kept: Numbers of the groups that stay unsharded from the forward to the backward.
        recomputed: Positions of the ops that the backward runs again.
        has_large_packs: Whether packs of several groups are gathered, and reduced, together.
        offloaded: Positions of the ops whose results wait for the backward in host memory.
    """

    kept: Collection[int] = frozenset()
    recomputed: Collection[int] = frozenset()
    has_large_packs: bool = False
    offloaded: Collection[int] = frozenset()
