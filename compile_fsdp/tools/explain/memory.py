"""Live bytes at each node of a graph: unsharded parameters, activations, gradients, recomputed and offloaded ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from torch import fx

from compile_fsdp.passes.analysis.aliases import is_declared_view
from compile_fsdp.passes.analysis.collectives import (
    RESHAPES,
    is_collective,
    is_fetch,
    is_gather,
    is_offload,
    is_rearrangement,
    is_wait,
)
from compile_fsdp.passes.analysis.costs import size_bytes
from compile_fsdp.passes.analysis.effects import get_argument, is_copy, is_resize, parameter_of
from compile_fsdp.passes.analysis.step_time import LiveBytes
from compile_fsdp.tools.explain.names import GraphNames
from compile_fsdp.torch_compat.dispatch import OpOverload
from compile_fsdp.torch_compat.inductor import graph_input_position, is_fused


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
        fills = {user: get_argument(user, 1, "new_size") != 0 for user in users if is_resize(user)}
        # An earlier graph has filled a parameter whose first use is no fill.
        is_filled = bool(users) and not fills.get(users[0], False)
        bounds = pairwise((0, *(position[user] for user in fills), len(position)))
        for (start, end), is_allocated in zip(bounds, (is_filled, *fills.values()), strict=True):
            if is_allocated:
                yield start, end, size_bytes(leaf)


def count_windows(graph: fx.Graph, names: GraphNames) -> Counter[str]:
    """Count the fills of each unsharded parameter, by FQN; by the placeholder's name if the FQN is not known."""
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if is_copy(node) and (filled := parameter_of(node)) is not None and filled.op == "placeholder":
            position = graph_input_position(filled)
            counts[filled.name if position is None else names.unsharded.get(position, filled.name)] += 1
    return counts


def alive_bytes(graph: fx.Graph, names: GraphNames, is_backward: bool) -> dict[str, list[int]]:
    """Estimate live bytes at each node by field of an `Event`, without gathered parameters, from the graph's reads.

    A node's result has memory unless Inductor fuses the node with its readers, as it does with pointwise ops. The
    memory lives until its last read; a result of the graph lives to the end. A backward's input from its forward lives
    from the beginning. A forward's inputs do not count, because the caller owns them.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    gathered = gathered_memory(graph)
    last = _find_last_reads(graph, position)
    again = _find_again(graph, names) if is_backward else set()
    kept, made, away = (LiveBytes(len(position)) for _ in range(3))
    for node, start in position.items():
        if node in gathered or is_view(node) or is_wait(node):
            continue
        size = size_bytes(node)
        if node.op == "placeholder":
            number = graph_input_position(node)
            if any(map(is_fetch, node.users)):
                away.hold(0, last[node], size)
            elif is_backward and number not in names.unsharded and number not in names.shards:
                kept.hold(0, last[node], size)
        elif is_offload(node):
            away.hold(start, len(position) - 1, size)
        elif node.op == "call_function" and _has_memory(node):
            each = made if node in again and not is_fetch(node) else kept
            each.hold(start, last[node], size)
    totals = {"activation_bytes": kept, "recomputed_bytes": made, "offloaded_bytes": away}
    return {field: held.totals() for field, held in totals.items()}


def _find_again(graph: fx.Graph, names: GraphNames) -> set[fx.Node]:
    """Recomputing calls of a backward: they need neither its first input, its incoming gradient, nor shards."""
    inputs = graph.find_nodes(op="placeholder")
    behind = {*inputs[:1], *(node for node in inputs if graph_input_position(node) in names.shards)}
    for node in graph.nodes:
        if any(each in behind for each in node.all_input_nodes):
            behind.add(node)
    return {node for node in graph.nodes if node.op == "call_function" and node not in behind}


def _find_last_reads(graph: fx.Graph, position: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Position of the last read of each node's memory, also through views and fused readers."""
    last: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        reads = [position[node]]
        for user in node.users:
            is_passed_on = is_view(user) or is_wait(user) or (user.op == "call_function" and not _has_memory(user))
            reads.append(last[user] if is_passed_on else position[user])
        last[node] = max(reads)
    return last


def _has_memory(node: fx.Node) -> bool:
    """Whether a node's result is written to memory: the node is a reduction, or it or a reader is not fused."""
    is_sum = any(size_bytes(each) > size_bytes(node) for each in node.all_input_nodes)
    return is_sum or not _is_fused(node) or any(not _is_fused(reader) for reader in _readers(node))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read a node's result, directly or through views."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _is_fused(node: fx.Node) -> bool:
    """Whether Inductor computes a node together with its readers."""
    return isinstance(node.target, OpOverload) and is_fused(node.target) and not is_collective(node)
