"""Live bytes of unsharded parameters at each node of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from compile_fsdp.passes.analysis.aliases import is_declared_view
from compile_fsdp.passes.analysis.collectives import RESHAPES, is_gather, is_rearrangement, is_wait
from compile_fsdp.passes.analysis.costs import size_bytes
from compile_fsdp.passes.analysis.effects import get_argument, is_copy, is_resize, parameter_of
from compile_fsdp.passes.analysis.live_bytes import LiveBytes
from compile_fsdp.tools.explain.names import GraphNames
from compile_fsdp.torch_compat.inductor import graph_input_position


def unsharded_bytes(graph: fx.Graph, names: GraphNames) -> list[int]:
    """By node, live bytes of all-gather outputs, their copies, and parameters in open windows.

    An all-gather output lives from its launch to the last read of the output or of a view of it. A parameter lives from
    the resize that opens its window to the resize that closes it, or to the end of the graph.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    live = LiveBytes(len(position))
    root = gathered_memory(graph)
    last = {node: position[node] for node in root.values()}
    for node, i in position.items():
        last.update((root[each], i) for each in node.all_input_nodes if each in root)
    for node, end in last.items():
        live.hold(position[node], end, size_bytes(node))
    for first, end, size in _windows(graph, names, position):
        live.hold(first, end - 1, size)
    return live.totals()


def gathered_memory(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map all-gathers, and nodes that only wait for, view or rearrange their outputs, to the node with the memory."""
    root: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        is_alias = is_wait(node) or is_view(node)
        if is_gather(node):
            root[node] = node
        elif inputs and (is_alias or is_rearrangement(node)) and all(each in root for each in inputs):
            root[node] = root[inputs[0]] if is_alias else node
    return root


def is_view(node: fx.Node) -> bool:
    """Whether a node's result is in the memory of its first input."""
    return node.target in RESHAPES or getattr(node.target, "__name__", "") == "getitem" or is_declared_view(node)


def _windows(graph: fx.Graph, names: GraphNames, position: dict[fx.Node, int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first node, node after the last, bytes) of each span in which a parameter's own storage is allocated."""
    for leaf in graph.find_nodes(op="placeholder"):
        if graph_input_position(leaf) not in names.unsharded:
            continue
        users = sorted((user for user in leaf.users if user.op != "output"), key=position.__getitem__)
        start = None
        if users and not (is_resize(users[0]) and get_argument(users[0], 1, "new_size") != 0):
            start = 0  # an earlier graph has filled it
        for user in users:
            if not is_resize(user):
                continue
            is_free = get_argument(user, 1, "new_size") == 0
            if is_free and start is not None:
                yield start, position[user], size_bytes(leaf)
                start = None
            elif not is_free and start is None:
                start = position[user]
        if start is not None:
            yield start, len(position), size_bytes(leaf)


def count_windows(graph: fx.Graph, names: GraphNames) -> Counter[str]:
    """Count the fills of each unsharded parameter, by FQN; by the placeholder's name if the FQN is not known."""
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if is_copy(node) and (filled := parameter_of(node)) is not None and filled.op == "placeholder":
            position = graph_input_position(filled)
            counts[filled.name if position is None else names.unsharded.get(position, filled.name)] += 1
    return counts
