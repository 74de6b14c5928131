"""Find a graph's windows: from resize(full) over copy_ and readers to resize(0).

[Note: A window starts freed]
The runtime frees an unsharded parameter before it opens a window. So a parameter whose first use is a resize(full)
arrives without memory, and removing the whole window leaves it without memory. If a parameter arrives filled, a node
reads it before any resize, or its first resize is to 0.

[Note: Windows do not cross graphs]
A graph break, or a parameter kept from forward to backward, leaves resize(full) in one graph and resize(0) in the next.
Neither graph alone proves the parameter dead in between. So a window that is open at the start or at the return counts
as live up to there, and its ops stay. The parameter's remaining windows are not concerned. The parameter itself in the
graph's output is no read, because the output saves the input and not its data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import SymInt, fx

from compile_fsdp.passes.analysis.aliases import Aliases, find_fake_tensor
from compile_fsdp.passes.analysis.effects import Effects, find_resizes, get_argument, is_copy, is_resize, parameter_of
from compile_fsdp.passes.analysis.layout import get_size, is_full, is_zero


@dataclass(slots=True, eq=False)
class Span:
    """One parameter from one of its resizes to the next."""

    resize: fx.Node | None  # starts the span; None for the first span, which starts with the graph
    size_bytes: int | SymInt | None = None  # that `resize` asks for; None if unknown
    frees: bool = False  # `resize` asks for 0 bytes
    full: bool = False  # `resize` surely makes room for the whole parameter
    filled_at: int = 0  # position of the last copy in the graph
    end: int = 0  # position of the next span's resize, or the number of nodes
    copies: list[fx.Node] = field(default_factory=list)  # fills: `fsdp.copy_` into the parameter itself
    readers: list[fx.Node] = field(default_factory=list)  # take the parameter or a view of it, and do not fill it
    read_before_copy: bool = False
    read_by_storage: bool = False
    fills_another: bool = False
    mutated: bool = False
    has_stale_view: bool = False  # a view made in this span is used in a different span, or the reverse
    view_escapes: bool = False  # the graph returns a view made in this span


@dataclass(slots=True, eq=False)
class Parameter:
    """An unsharded parameter: a placeholder that the graph resizes."""

    node: fx.Node
    spans: list[Span]  # in graph order; they tile the graph
    shares_storage: bool = False  # a second input or attribute may lie in its storage


def resized_placeholders(graph: fx.Graph) -> set[fx.Node]:
    resized = map(parameter_of, find_resizes(graph))
    return {node for node in resized if node is not None and node.op == "placeholder"}


class Lifetimes:
    """Resized parameters of a graph, in graph order, and facts about storages for a rewrite; found in one pass."""

    def __init__(self, graph: fx.Graph) -> None:
        self.parameters: list[Parameter] = []
        self.writes: dict[int, list[int]] = {}  # by alias class, positions of nodes that may write it
        self.resized: set[int] = set()  # alias classes that some node resizes
        self._effects = Effects(graph.owning_module)
        self.aliases = Aliases(graph, self._effects)
        self._by_class: dict[int, list[Parameter]] = {}
        self._inputs_by_class = Counter[int]()  # number of inputs and attributes, by alias class
        self._home: dict[fx.Node, Span] = {}  # by view, the span that made it
        resized = resized_placeholders(graph)
        for position, node in enumerate(graph.nodes):
            if node.op in ("placeholder", "get_attr"):
                self._visit_input(node, node in resized)
            else:
                self._visit(position, node)
        for parameter in self.parameters:
            parameter.spans[-1].end = len(graph.nodes)
            classes = self.aliases.classes(parameter.node)
            parameter.shares_storage = any(self._inputs_by_class[key] > 1 for key in classes)

    def _visit_input(self, node: fx.Node, is_parameter: bool) -> None:
        classes = self.aliases.classes(node)
        self._inputs_by_class.update(classes)
        if is_parameter:
            parameter = Parameter(node, [Span(None)])
            self.parameters.append(parameter)
            for key in classes:
                self._by_class.setdefault(key, []).append(parameter)

    def _visit(self, position: int, node: fx.Node) -> None:
        written = self._effects.written_inputs(node)
        for key in self.aliases.classes_of(written):
            self.writes.setdefault(key, []).append(position)
            if is_resize(node):
                self.resized.add(key)
        for parameter, sources in self._touched(node).items():
            if node.op == "output":
                for source in sources:
                    if source in self._home:
                        self._home[source].view_escapes = True
            elif is_resize(node) and parameter_of(node) is parameter.node:
                parameter.spans[-1].end = position
                size_bytes = get_size(get_argument(node, 1, "new_size"))
                is_whole = is_full(size_bytes, find_fake_tensor(parameter.node))
                parameter.spans.append(Span(node, size_bytes, frees=is_zero(size_bytes), full=is_whole))
            else:
                self._visit_use(position, node, parameter, sources, written)

    def _touched(self, node: fx.Node) -> dict[Parameter, list[fx.Node]]:
        """Return the parameters that the node takes, with their aliasing inputs."""
        found: dict[Parameter, list[fx.Node]] = {}
        for source in node.all_input_nodes:
            for key in self.aliases.classes(source):
                for parameter in self._by_class.get(key, ()):
                    found.setdefault(parameter, []).append(source)
        return found

    def _visit_use(
        self, position: int, node: fx.Node, parameter: Parameter, sources: Sequence[fx.Node], written: Sequence[fx.Node]
    ) -> None:
        span = parameter.spans[-1]
        for source in sources:
            home = self._home.get(source, span)
            if home is not span:
                home.has_stale_view = span.has_stale_view = True
        if parameter_of(node) is parameter.node:
            span.filled_at = position
            span.copies.append(node)
            return
        span.read_before_copy |= not span.copies
        span.mutated |= any(source in written for source in sources)
        span.fills_another |= is_copy(node)
        span.read_by_storage |= self._effects.reads_storage(node)
        span.readers.append(node)
        if any(parameter in self._by_class.get(key, ()) for key in self.aliases.classes(node)):
            self._home[node] = span
