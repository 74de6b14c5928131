"""Read a step from Dynamo's forward graph.

[Note: Values that the partitioner saves]
AOTAutograd's partitioner saves the values that autograd would save, with two exceptions: results that pointwise ops and
reductions compute from saved values, and values that only such ops need. The backward computes these again together
with their readers. A value that a separate kernel reads in the backward is saved, however cheap it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from compile_fsdp.passes.analysis.aliases import find_fake_tensor, get_fake_tensor
from compile_fsdp.passes.analysis.eager_effects import is_upkeep
from compile_fsdp.passes.analysis.effects import Effects, get_argument, is_copy, parameter_of
from compile_fsdp.passes.analysis.layout import get_size, is_free, size_hint
from compile_fsdp.passes.budget.op_facts import Kind, OpFacts, OpMeasure, result_tensors, tensor_arguments
from compile_fsdp.passes.budget.step_memory import Group, Parameter, Sharding, Step, Value
from compile_fsdp.torch_compat.dispatch import is_checkpoint, storage_key
from compile_fsdp.torch_compat.dynamo import recomputation


def read_step(
    graph: fx.Graph,
    parameters: Mapping[fx.Node, Sharding],
    *,
    fuses: bool = True,
    is_body: bool = False,
    measure: OpMeasure | None = None,
) -> Step:
    """Return the step of a forward graph, or of a checkpoint's body: see [Note: Bodies of checkpoints].

    Args:
        graph: With fake values under meta["example_value"].
        parameters: Shardings of the unsharded parameters among the graph's placeholders.
        fuses: Whether pointwise ops are compiled together with their readers.
    """
    reader = _Reader(graph, parameters)
    measure, upkeep = measure or OpMeasure(fuses=fuses), _find_upkeep(graph)
    effects, bodies = Effects(graph.owning_module), dict[int, Step]()
    for node in graph.nodes:
        if node in upkeep:
            reader.fill_or_free(node)
        elif node.op in ("call_function", "call_method") and result_tensors(node):
            if (body := _find_body(node, effects)) is not None:
                within, given = body
                inside = {inner: parameters[outer] for inner, outer in given if outer in parameters}
                bodies[len(reader.ops)] = read_step(within, inside, fuses=fuses, is_body=True, measure=measure)
            reader.add(node, measure.facts(node))
    for value in reader.values_of(graph.output_node().all_input_nodes):
        value.is_result = True
    groups = sorted((each for each in reader.groups.values() if each.uses), key=lambda each: min(each.uses))
    windows: list[Group | None] = [None] * len(reader.ops)
    freed = [group for group in groups if group.frees]
    for group in sorted(freed, key=lambda group: group.filled_at - group.freed_at):
        windows[group.filled_at : group.freed_at] = [group] * (group.freed_at - group.filled_at)
    step = Step(
        ops=reader.ops,
        facts=reader.facts,
        made=reader.made,
        read=reader.read,
        internal=reader.internal,
        windows=windows,
        groups=groups,
        bodies=bodies,
        fuses=fuses,
        is_body=is_body,
    )
    _find_saved(step)
    return step


class _Reader:
    """Ops and values read so far; see `Step`."""

    def __init__(self, graph: fx.Graph, parameters: Mapping[fx.Node, Sharding]) -> None:
        self.ops: list[fx.Node] = []
        self.facts: list[OpFacts] = []
        self.made: list[list[Value]] = []
        self.read: list[list[Group]] = []
        self.internal: list[int] = []
        self.groups: dict[int, Group] = {}  # by number
        self._values: dict[int | None, Value] = {}
        self._parameters: dict[int | None, tuple[Group, Parameter]] = {}
        for node, sharding in parameters.items():
            tensor = get_fake_tensor(node)
            parameter = Parameter(sharding, tensor.requires_grad)
            group = self.groups.setdefault(sharding.group, Group(sharding.group))
            group.parameters.append(parameter)
            self._parameters[storage_key(tensor)] = group, parameter
        inputs = graph.find_nodes(op="placeholder")
        self._inputs = {storage_key(each) for node in inputs for each in result_tensors(node)}

    def values_of(self, nodes: Iterable[fx.Node]) -> Iterator[Value]:
        keys = (storage_key(each) for node in nodes for each in result_tensors(node))
        return (self._values[key] for key in keys if key in self._values)

    def fill_or_free(self, node: fx.Node) -> None:
        tensor = find_fake_tensor(parameter_of(node))
        found = None if tensor is None else self._parameters.get(storage_key(tensor))
        if found is None:
            return
        group, parameter = found
        if is_copy(node):
            parameter.fills += 1
            group.filled_at = len(self.ops)
        elif is_free(node):
            group.frees.append(node)
            group.freed_at = len(self.ops)
        else:
            parameter.size = size_hint(get_size(get_argument(node, 1, "new_size")))

    def add(self, node: fx.Node, facts: OpFacts) -> None:
        if recomputation(node) is not None:  # `save_before_writes` forbids it
            facts = replace(facts, is_repeatable=False)
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


def _find_saved(step: Step) -> None:
    """Set `is_saved` of each value: see [Note: Values that the partitioner saves]."""
    for value in step.values:
        # A checkpoint returns it, and none takes it. Nothing runs again within a body.
        is_result = not step.is_body and is_checkpoint(step.ops[value.made_at])
        value.is_from_checkpoint = is_result and not any(is_checkpoint(step.ops[each]) for each in value.uses)
        value.is_saved = bool(value.saved_by) and not value.is_from_checkpoint
    for value in step.values:
        if not value.is_saved or any(step.facts[each].kind is Kind.HEAVY for each in value.saved_by):
            continue
        origins = _find_origins(step, value)
        if origins is not None and _is_cheap(step, value):
            value.is_saved = False
            for origin in origins:
                origin.saved_by += value.saved_by


def _is_cheap(step: Step, value: Value) -> bool:
    """Return whether the value is computed again together with its readers."""
    return value.kind is not Kind.HEAVY and step.facts[value.made_at].is_repeatable


def _find_origins(step: Step, value: Value) -> list[Value] | None:
    """Return the values at hand from which cheap ops compute the value; None if other ops must run."""
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
        elif _is_cheap(step, source):
            stack += source.sources
        else:
            return None
    return list(found)


def _find_body(node: fx.Node, effects: Effects) -> tuple[fx.Graph, list[tuple[fx.Node, Any]]] | None:
    """Return the graph that an op runs, if any, and (placeholder, operand) pairs."""
    for attribute in node.args[:1]:
        if isinstance(attribute, fx.Node) and (body := effects.subgraph(attribute)) is not None:
            placeholders = body.graph.find_nodes(op="placeholder")
            # Not strict, because a loop has two graphs.
            return body.graph, list(zip(placeholders, node.args[-len(placeholders) :], strict=False))
    return None


def _find_upkeep(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that only fill and free parameters, and gathers and views that only these nodes need."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if is_upkeep(node) or (node.users and all(user in found for user in node.users)):
            found.add(node)
    return found
