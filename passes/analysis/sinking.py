"""Plan which nodes sink behind the first fill of a parameter.

[Note: Reads float over their parameter's events]
A parameter that only its fills write has one value in a backward graph. So a read may pass any resize or fill of that
parameter without changing its result, as long as it ends up where the parameter is filled. All remaining dependencies
keep their order. So if a node sinks, these later nodes sink, too: nodes that use its results, nodes that write its
inputs, and nodes that read or write a tensor that it writes. Random ops keep their order among random ops.

Either all reads sink or none, because a read of two parameters is often one node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from compile_fsdp.passes.analysis.aliases import Aliases
from compile_fsdp.passes.analysis.eager_effects import (
    EagerEffects,
    is_autocast_switch,
    is_passed_through,
    is_version_op,
    is_version_setter,
)
from compile_fsdp.passes.analysis.effects import is_copy, is_resize, parameter_of
from compile_fsdp.passes.analysis.layout import is_free
from compile_fsdp.passes.report import Unmoved

Move = tuple[fx.Node, fx.Node]
"""A node, and the node to move it behind."""


@dataclass(frozen=True, slots=True)
class Fill:
    """First fill of a parameter that arrives freed.

    Reads sink behind the last of the consecutive copies and version-counter ops at the fill.
    """

    position: int  # of `behind` in the graph; of the resize if `behind` is None
    behind: fx.Node | None  # None if no copy follows the resize


class Scan:
    """Facts about the parameters of a graph, from one scan. `parameters`: inputs that the graph resizes."""

    def __init__(self, graph: fx.Graph, parameters: set[fx.Node]) -> None:
        self.parameters = parameters
        self.effects = EagerEffects(graph.owning_module)
        self.aliases = Aliases(graph, self.effects)
        self.by_class: dict[int, list[fx.Node]] = {}  # parameters in each alias class
        self.mutated: set[fx.Node] = set()  # a node may write them without filling or resizing them
        events: dict[fx.Node, list[int]] = {}
        nodes = list(graph.nodes)
        # (n + 1,) number of autocast switches before each node, and before the end
        self.autocast_switches = [0, *accumulate(map(is_autocast_switch, nodes))]
        for position, node in enumerate(nodes):
            if node in parameters:
                for key in self.aliases.classes(node):
                    self.by_class.setdefault(key, []).append(node)
            if (event := self.find_event(node)) is not None:
                events.setdefault(event, []).append(position)
            written = self.aliased_by(self.effects.written_inputs(node))
            self.mutated.update(parameter for parameter in written if parameter is not event)
        self.fills = {  # of each parameter that arrives freed
            parameter: _find_fill(nodes, positions)
            for parameter, positions in events.items()
            if _is_opening(nodes[positions[0]])
        }

    def find_event(self, node: fx.Node) -> fx.Node | None:
        """Return the parameter that the node resizes or fills."""
        target = parameter_of(node)
        return target if target in self.parameters else None

    def aliased_by(self, nodes: Iterable[fx.Node]) -> Iterable[fx.Node]:
        return dict.fromkeys(p for key in self.aliases.classes_of(nodes) for p in self.by_class.get(key, ()))


def _find_fill(nodes: Sequence[fx.Node], events: Sequence[int]) -> Fill:
    """Return the first fill of a parameter whose first event is a resize to more than 0."""
    position = next((each for each in events if not _is_opening(nodes[each])), None)
    if position is None or not is_copy(nodes[position]):
        return Fill(events[0], None)
    while is_copy(nodes[position + 1]) or is_version_setter(nodes[position + 1]):
        position += 1
    return Fill(position, nodes[position])


def _is_opening(node: fx.Node) -> bool:
    return is_resize(node) and not is_free(node)


class Sinking:
    """Plan of moves, made by visiting every node in order."""

    def __init__(self, scan: Scan) -> None:
        self.moves: list[Move] = []  # in graph order
        self.faults: dict[fx.Node, Unmoved] = {}  # parameters that the moves cannot repair; if any, no move may be made
        self._scan = scan
        self._behind: dict[int, tuple[fx.Node, fx.Node]] = {}  # position to (parameter, node to sink behind)
        # Position that a node sinks behind: by node, by alias class read or written, and of ordered nodes.
        self._sunk: dict[fx.Node, int] = {}
        self._readers: dict[int, int] = {}
        self._writers: dict[int, int] = {}
        self._ordered = -1

    def visit(self, position: int, node: fx.Node) -> None:
        if is_version_op(node) or is_passed_through(node):
            return
        event = self._scan.find_event(node)
        read = self._shared_classes(node.all_input_nodes)
        written = self._shared_classes(self._scan.effects.written_inputs(node))
        is_ordered = self._scan.effects.is_ordered(node)
        depth = max(
            self._depth_of_reads(position, node, event),
            *(self._sunk.get(source, -1) for source in node.all_input_nodes),
            *(self._writers.get(key, -1) for key in read),
            *(self._readers.get(key, -1) for key in written),
            self._ordered if is_ordered else -1,
        )
        if depth < position:  # Equal: the fill itself depends on a node that sinks behind it.
            return
        cause, behind = self._behind[depth]
        if event is not None:
            self.faults.setdefault(cause, Unmoved.FILL_DEPENDS_ON_READ)
        elif self._scan.autocast_switches[position] != self._scan.autocast_switches[depth]:
            self.faults.setdefault(cause, Unmoved.AUTOCAST)
        self.moves.append((node, behind))
        self._sunk[node] = depth
        self._readers.update((key, max(depth, self._readers.get(key, -1))) for key in read)
        self._writers.update((key, max(depth, self._writers.get(key, -1))) for key in written)
        self._ordered = max(depth, self._ordered) if is_ordered else self._ordered

    def _depth_of_reads(self, position: int, node: fx.Node, event: fx.Node | None) -> int:
        """Return the position to sink behind because of the node's own reads; -1 if they need no sinking."""
        depth = -1
        for parameter in self._scan.aliased_by(node.all_input_nodes):
            fill = self._scan.fills.get(parameter)
            if parameter is event or fill is None or fill.position <= position:
                continue
            if fill.behind is None:
                self.faults.setdefault(parameter, Unmoved.NO_COPY)
            elif parameter in self._scan.mutated:
                self.faults.setdefault(parameter, Unmoved.MUTATED)
            else:
                depth = max(depth, fill.position)
                self._behind.setdefault(fill.position, (parameter, fill.behind))
        return depth

    def _shared_classes(self, nodes: Iterable[fx.Node]) -> list[int]:
        """Return the classes whose reads do not float: see [Note: Reads float over their parameter's events]."""
        return [
            key
            for key in self._scan.aliases.classes_of(nodes)
            if not (held := self._scan.by_class.get(key)) or any(p in self._scan.mutated for p in held)
        ]
