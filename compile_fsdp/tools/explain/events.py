"""Read a graph as events of modules: launches, waits, copies and computations."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from compile_fsdp.passes.analysis.collectives import (
    aten,
    find_packed,
    is_all_reduce,
    is_fetch,
    is_gather,
    is_offload,
    is_rearrangement,
    is_reduction,
    is_wait,
)
from compile_fsdp.passes.analysis.costs import COSTS, Costs, communication, compute_seconds, device_costs
from compile_fsdp.tools.explain.memory import alive_bytes, unsharded_bytes
from compile_fsdp.tools.explain.names import NO_MODULE, GraphNames, common_module, module_names
from compile_fsdp.tools.explain.text import operation
from compile_fsdp.torch_compat.inductor import graph_input_position, graph_output_positions
from compile_fsdp.wrap.tree import ROOT

_MEMORY = ("alive_bytes", "activation_bytes", "recomputed_bytes", "offloaded_bytes")  # of an event

Names = frozenset[str]
_NONE: Names = frozenset()


class Kind(str, enum.Enum):
    """The kind of an event; each kind except waits is a lane in the timeline."""

    GATHER = "gather"
    REDUCE = "reduce"
    ALL_REDUCE = "all-reduce"
    OFFLOAD = "offload"
    FETCH = "fetch"
    WAIT = "wait"
    COPY = "copy"
    COMPUTE = "compute"


# Events that use the link to the host's memory.
TRANSFERS = (Kind.OFFLOAD, Kind.FETCH)


def _launched_kind(node: fx.Node) -> Kind | None:
    """The kind of a node that launches a collective, or a copy from or to the host; else None."""
    if is_offload(node):
        return Kind.OFFLOAD
    if is_fetch(node):
        return Kind.FETCH
    if is_gather(node):
        return Kind.GATHER
    if is_reduction(node):
        return Kind.REDUCE
    return Kind.ALL_REDUCE if is_all_reduce(node) else None


@dataclass(frozen=True, slots=True)
class Event:
    """A collective, a copy or a computation at one place of a graph. Bytes of memory are the most during the event."""

    kind: Kind
    name: str  # FQN of the module; for a collective, FQN of the modules whose parameters it carries
    parameters: tuple[str, ...]  # FQNs of the parameters that a collective or copy carries, or that a computation reads
    operations: tuple[str, ...]  # names of the ops, in their order
    size_bytes: int  # of an all-gather output, a reduce-scatter or all-reduce input, or a tensor from or to the host
    seconds: float  # estimated, without waiting
    alive_bytes: int = 0  # of unsharded parameters
    collective: int = -1  # number that a launch and its wait have in common; -1 for copies and computations
    gradients: tuple[str, ...] = ()  # FQNs of the parameters whose gradients a computation makes
    activation_bytes: int = 0  # of activations, gradients and tensors packed for a collective
    recomputed_bytes: int = 0  # of recomputed activations, which do not depend on the backward's incoming gradient
    offloaded_bytes: int = 0  # of offloaded activations in the host's memory, which the backward has not fetched


def read_events(graph: fx.Graph, names: GraphNames, costs: Costs | None, is_backward: bool) -> list[Event]:
    """Read the events of a post-grad graph after the passes, in node order.

    Consecutive computations in one module are one event, and so are consecutive copies. Without `costs`, the device's
    costs count.
    """
    return _Reader(graph, names, costs, is_backward).read()


class _Reader:
    def __init__(self, graph: fx.Graph, names: GraphNames, costs: Costs | None, is_backward: bool) -> None:
        self.graph = graph
        collective = next((node for node in graph.nodes if _launched_kind(node)), None)
        self.costs = costs or (COSTS["cpu"] if collective is None else device_costs(collective))
        self.parameters, self.sent = trace_parameters(graph, names)
        self.gradients = _find_gradients(graph, names)  # parameters whose gradients a node computes or carries
        # By field, live bytes at each node.
        self.memory = {"alive_bytes": unsharded_bytes(graph, names), **alive_bytes(graph, names, is_backward)}
        self.modules = module_names(graph, self._modules_of, is_backward)
        self.collectives: dict[fx.Node, int] = {}

    def read(self) -> list[Event]:
        events: list[Event] = []
        for i, node in enumerate(self.graph.nodes):
            if node.op not in ("call_function", "call_method") or (event := self._event(node)) is None:
                continue
            memory: dict[str, Any] = {field: sizes[i] for field, sizes in self.memory.items()}
            event = replace(event, operations=(operation(node),), **memory)
            last = events[-1] if events else None
            if last and last.kind is event.kind in (Kind.COMPUTE, Kind.COPY) and last.name == event.name:
                events[-1] = _join(last, event)
            else:
                events.append(event)
        return events

    def _event(self, node: fx.Node) -> Event | None:
        """Make the event of a node without its memory; None for a view or an unknown op."""
        kind = _launched_kind(node)
        if kind is not None or is_wait(node):
            launch = node.all_input_nodes[0] if kind is None else node
            if kind is not None:
                self.collectives[node] = len(self.collectives)
            carried = self.parameters.get(node, _NONE) | self.gradients.get(launch, _NONE)
            name = _modules(carried) or self.modules.get(launch, NO_MODULE)
            size, seconds = (0, 0.0) if kind is None else communication(node, self.costs)
            number = self.collectives.get(launch, -1)
            return Event(kind or Kind.WAIT, name, tuple(sorted(carried)), (), size, seconds, collective=number)
        seconds = compute_seconds(node, self.costs)
        if seconds == 0.0:
            return None
        own = self.parameters.get(node) or self.sent.get(node)
        if own:  # a copy into a gather's input or out of its output
            return Event(Kind.COPY, _modules(own), tuple(sorted(own)), (), 0, seconds)
        read, made = self._read(node), self.gradients.get(node, _NONE)
        name = self.modules.get(node, NO_MODULE)
        if made and not read and is_rearrangement(node):
            return Event(Kind.COPY, name, tuple(sorted(made)), (), 0, seconds)
        return Event(Kind.COMPUTE, name, tuple(sorted(read)), (), 0, seconds, gradients=tuple(sorted(made)))

    def _read(self, node: fx.Node) -> Names:
        return _NONE.union(*(self.parameters.get(each, _NONE) for each in node.all_input_nodes))

    def _modules_of(self, node: fx.Node) -> str:
        return _modules(self._read(node) or self.gradients.get(node, _NONE))


def _join(last: Event, event: Event) -> Event:
    memory: dict[str, Any] = {name: max(getattr(last, name), getattr(event, name)) for name in _MEMORY}
    return replace(
        last,
        parameters=tuple(sorted({*last.parameters, *event.parameters})),
        gradients=tuple(sorted({*last.gradients, *event.gradients})),
        operations=last.operations + event.operations,
        seconds=last.seconds + event.seconds,
        **memory,
    )


def _modules(parameters: Names) -> str:
    """Common prefix of the FQNs of the parameters' modules, or all FQNs without a prefix; "" without parameters."""
    modules = sorted({fqn.rpartition(".")[0] or ROOT for fqn in parameters})
    return common_module(modules) or ", ".join(modules)


def trace_parameters(graph: fx.Graph, names: GraphNames) -> tuple[dict[fx.Node, Names], dict[fx.Node, Names]]:
    """FQNs of the parameters that each node holds unsharded, at least in part, and that each node holds as shards."""
    found: dict[fx.Node, Names] = {}
    sent: dict[fx.Node, Names] = {}
    apart = {output: source for source, output in _packed_parts(graph, is_gather)}
    for node in graph.nodes:
        position = graph_input_position(node) if node.op == "placeholder" else None
        inputs = node.all_input_nodes
        if position in names.unsharded:
            found[node] = frozenset((names.unsharded[position],))
        elif position in names.shards:
            sent[node] = frozenset((names.shards[position],))
        elif is_gather(node):
            if own := sent.get(inputs[0], _NONE):
                found[node] = own
        elif inputs and (is_rearrangement(node) or is_wait(node)):
            if all(each in found for each in inputs):
                known = sent.get(apart[node], _NONE) if node in apart else _NONE
                found[node] = known or _NONE.union(*(found[each] for each in inputs))
            elif all(each in sent for each in inputs):
                sent[node] = _NONE.union(*(sent[each] for each in inputs))
    return found, sent


def _find_gradients(graph: fx.Graph, names: GraphNames) -> dict[fx.Node, Names]:
    """By node, FQNs of the parameters whose gradients it computes, packs or reduces, traced from the results."""
    found: dict[fx.Node, Names] = {}
    output = graph.output_node()
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else ()
    for node, position in zip(results, graph_output_positions(output), strict=False):
        if isinstance(node, fx.Node) and position in names.gradients:
            found[node] = found.get(node, _NONE) | {names.gradients[position]}
    apart = dict(_packed_parts(graph, is_reduction))
    for node in reversed(graph.nodes):
        users = [user for user in node.users if user in found and _carries(user)]
        own = found.get(apart[node], _NONE) if node in apart else _NONE.union(*(found[user] for user in users))
        if own:
            found[node] = found.get(node, _NONE) | own
    return found


def _packed_parts(graph: fx.Graph, is_kind: Callable[[fx.Node], bool]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (input, output) of each tensor that a packed collective carries, if anything reads the output."""
    for each in find_packed(graph, is_kind):
        for source, output in zip(each.inputs, each.outputs, strict=True):
            if output is not None:
                yield source, output


def _carries(node: fx.Node) -> bool:
    is_sum = node.target == aten.add.Tensor  # with the gradient of earlier microbatches
    launched = _launched_kind(node)
    return is_sum or is_rearrangement(node) or is_wait(node) or launched in (Kind.REDUCE, Kind.ALL_REDUCE)
