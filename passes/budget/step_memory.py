"""Bytes that a step allocates over time, from Dynamo's forward graph.

[Note: A timeline of both halves]
The timeline lists the ops of the forward in order, followed by as many places of the backward in mirrored order: the
backward of an op stands at the op's mirrored place. If the forward holds a value from one op to a later op, the
backward holds the value's gradient between the two mirrored places. A value saved for the backward is held from its op
to the backward of the first op that needs it.

[Note: What the partitioner saves]
AOTAutograd's partitioner saves the values that autograd would save, with two exceptions: results that pointwise ops and
reductions compute from saved values, and values that only such ops need. The backward computes these again together
with their readers. A value that a separate kernel reads in the backward is saved, however cheap it is.

[Note: Bodies of checkpoints]
A user's checkpoint is one op with a body: a graph that runs in the forward, and again in the backward just before the
backward of the body. So a body has its own `Step`. Between forward and backward only the inputs of the op are held. At
both places there is room for the most bytes that the body holds at a time, including the parameters that it gathers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from compile_fsdp.passes.analysis.aliases import find_fake_tensor
from compile_fsdp.passes.analysis.eager_effects import is_upkeep
from compile_fsdp.passes.analysis.effects import Effects, get_argument, is_copy, is_resize
from compile_fsdp.passes.analysis.layout import get_size, is_zero, size_hint
from compile_fsdp.passes.budget.op_facts import Kind, OpFacts, OpMeasure, result_tensors, tensor_arguments
from compile_fsdp.torch_compat.dispatch import is_checkpoint, storage_key


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


class Step:
    """A forward, and the values that its backward needs.

    Attributes:
        ops: Nodes that compute, in graph order.
        facts: Facts per op.
        made: Memory that each op allocates, per op.
        read: Groups whose parameters an op computes with, per op.
        internal: Bytes that an op saves besides inputs and results, per op.
        groups: Groups that are read, in the order of their first use.
        windows: Innermost group that is gathered for an op and freed behind it, per op; None outside of all such
            windows.
        bodies: By position of an op that runs a graph, the step of that graph: see [Note: Bodies of checkpoints].
        fuses: Whether values that are fused with their reader take no memory; False for graphs run op by op.
        is_body: Whether the step is a body.
    """

    def __init__(
        self,
        graph: fx.Graph,
        parameters: Mapping[fx.Node, Sharding],
        *,
        fuses: bool = True,
        is_body: bool = False,
        measure: OpMeasure | None = None,
    ) -> None:
        self.fuses, self.is_body = fuses, is_body
        self.ops: list[fx.Node] = []
        self.facts: list[OpFacts] = []
        self.made: list[list[Value]] = []
        self.read: list[list[Group]] = []
        self.internal: list[int] = []
        self.bodies: dict[int, Step] = {}
        self._values: dict[int | None, Value] = {}
        self._parameters: dict[int | None, tuple[Group, Parameter]] = {}
        by_number: dict[int, Group] = {}
        for node, sharding in parameters.items():
            tensor = find_fake_tensor(node)
            assert tensor is not None
            parameter = Parameter(sharding, tensor.requires_grad)
            group = by_number.setdefault(sharding.group, Group(sharding.group))
            group.parameters.append(parameter)
            self._parameters[storage_key(tensor)] = group, parameter
        inputs = graph.find_nodes(op="placeholder")
        self._inputs = {storage_key(each) for node in inputs for each in result_tensors(node)}
        measure, upkeep = measure or OpMeasure(fuses=fuses), _find_upkeep(graph)
        effects = Effects(graph.owning_module)
        for node in graph.nodes:
            if node in upkeep:
                self._fill_or_free(node)
            elif node.op in ("call_function", "call_method") and result_tensors(node):
                if (body := _find_body(node, effects)) is not None:
                    within, given = body
                    inside = {inner: parameters[outer] for inner, outer in given if outer in parameters}
                    self.bodies[len(self.ops)] = Step(within, inside, fuses=fuses, is_body=True, measure=measure)
                self._add(node, measure.facts(node))
        for node in graph.output_node().all_input_nodes:
            for value in self._values_of(node):
                value.is_result = True
        self._find_saved()
        self.groups = sorted((each for each in by_number.values() if each.uses), key=lambda each: min(each.uses))
        self.windows: list[Group | None] = [None] * len(self.ops)
        freed = [group for group in self.groups if group.frees]
        for group in sorted(freed, key=lambda group: group.filled_at - group.freed_at):
            self.windows[group.filled_at : group.freed_at] = [group] * (group.freed_at - group.filled_at)

    @property
    def values(self) -> Iterator[Value]:
        return (value for made in self.made for value in made)

    def _values_of(self, node: fx.Node) -> list[Value]:
        keys = dict.fromkeys(storage_key(each) for each in result_tensors(node))
        return [self._values[key] for key in keys if key in self._values]

    def _fill_or_free(self, node: fx.Node) -> None:
        parameter_node = get_argument(node, 0, "variable" if is_resize(node) else "tensor")
        tensor = find_fake_tensor(parameter_node)
        found = None if tensor is None else self._parameters.get(storage_key(tensor))
        if found is None:
            return
        group, parameter = found
        if is_copy(node):
            parameter.fills += 1
            group.filled_at = len(self.ops)
        elif is_resize(node) and is_zero(size := get_size(get_argument(node, 1, "new_size"))):
            group.frees.append(node)
            group.freed_at = len(self.ops)
        elif is_resize(node):
            parameter.size = size_hint(size)

    def _add(self, node: fx.Node, facts: OpFacts) -> None:
        position = len(self.ops)
        taken = [storage_key(each) for each in tensor_arguments(node)]
        sources = list(dict.fromkeys(self._values[key] for key in taken if key in self._values))
        for value in sources:
            value.uses.append(position)
        read: list[Group] = []
        for group, parameter in (self._parameters[key] for key in dict.fromkeys(taken) if key in self._parameters):
            parameter.uses.append(position)
            read.append(group)
        made = []
        for tensor in result_tensors(node):
            key = storage_key(tensor)
            if key not in self._values and key not in self._inputs:  # parameters are inputs, too
                size = size_hint(tensor.untyped_storage().nbytes())
                self._values[key] = Value(position, size, facts.kind, sources)
                made.append(self._values[key])
            if key in self._values:
                self._values[key].needs_grad |= tensor.requires_grad
        saved = [taken[i] for i in facts.saved_inputs]
        if facts.saves_result:
            saved += [storage_key(each) for each in result_tensors(node)]
        for key in dict.fromkeys(saved):
            if key in self._values:
                self._values[key].saved_by.append(position)
        self.ops.append(node)
        self.facts.append(facts)
        self.made.append(made)
        self.read.append(list(dict.fromkeys(read)))
        self.internal.append(facts.internal_bytes)
        if facts.internal_bytes and facts.kind is Kind.FUSED and facts.is_repeatable:
            # The backward computes the op again if its inputs are no larger than its internal bytes.
            missing = [value for value in sources if not value.saved_by]
            if sum(value.size for value in missing) <= facts.internal_bytes:
                for value in sources:
                    value.saved_by.append(position)
                self.internal[-1] = 0

    def _find_saved(self) -> None:
        """Set `is_saved` of each value: see [Note: What the partitioner saves]."""
        for value in self.values:
            value.is_from_checkpoint = self._is_from_checkpoint(value)
            value.is_saved = bool(value.saved_by) and not value.is_from_checkpoint
        for value in self.values:
            if not value.is_saved or any(self.facts[each].kind is Kind.HEAVY for each in value.saved_by):
                continue
            origins = self.origins(value)
            if origins is not None and self.is_cheap(value):
                value.is_saved = False
                for origin in origins:
                    origin.saved_by += value.saved_by

    def _is_from_checkpoint(self, value: Value) -> bool:
        """Return whether a checkpoint returns the value, and no checkpoint takes it.

        False within a body, because nothing runs again there.
        """
        is_result = not self.is_body and is_checkpoint(self.ops[value.made_at])
        return is_result and not any(is_checkpoint(self.ops[each]) for each in value.uses)

    def is_cheap(self, value: Value) -> bool:
        """Return whether the value is computed again together with its readers."""
        return value.kind is not Kind.HEAVY and self.facts[value.made_at].is_repeatable

    def origins(self, value: Value) -> list[Value] | None:
        """Return the values at hand from which cheap ops compute the value.

        None if the computation needs a value that is neither at hand nor cheap.
        """
        found: dict[Value, None] = {}
        seen = {value}
        stack = list(value.sources)
        while stack:
            source = stack.pop()
            if source in seen:
                continue
            seen.add(source)
            if source.is_at_hand:
                found[source] = None
            elif self.is_cheap(source):
                stack += source.sources
            else:
                return None
        return list(found)


def _find_body(node: fx.Node, effects: Effects) -> tuple[fx.Graph, list[tuple[fx.Node, Any]]] | None:
    """Return the graph that an op runs, and (placeholder, operand) pairs.

    None if the op runs no graph.
    """
    for attribute in node.args[:1]:
        if isinstance(attribute, fx.Node) and (body := effects.subgraph(attribute)) is not None:
            placeholders = body.graph.find_nodes(op="placeholder")
            # Not strict, because a loop has two graphs.
            return body.graph, list(zip(placeholders, node.args[-len(placeholders) :], strict=False))
    return None


def _find_upkeep(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that only fill and free parameters.

    Includes the nodes that only they need: the gathers and their views.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        if is_upkeep(node) or (node.users and all(user in found for user in node.users)):
            found.add(node)
    return found
