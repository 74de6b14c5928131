"""How many bytes of anything but unsharded parameters are alive at each node of a graph, and which were made again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from compile_fsdp.passes.analysis.collectives import (
    is_collective,
    is_fetch,
    is_gather,
    is_offload,
    is_rearrangement,
    is_wait,
)
from compile_fsdp.passes.analysis.costs import size_bytes
from compile_fsdp.tools.explain.memory import is_view
from compile_fsdp.tools.explain.names import GraphNames
from compile_fsdp.torch_compat.dispatch import OpOverload
from compile_fsdp.torch_compat.inductor import graph_input_position, is_fused


@dataclass(frozen=True, slots=True)
class Alive:
    """Bytes by node.

    Attributes:
        kept: Of activations, gradients and what is packed for a collective.
        again: Of what a backward computes of something else than the gradient that it begins with.
        away: In the host's memory, of what is offloaded until the backward has fetched it.
    """

    kept: list[int]
    again: list[int]
    away: list[int]


def alive_bytes(graph: fx.Graph, names: GraphNames) -> Alive:
    """What is alive besides gathered parameters, by the reads of the graph.

    A result has memory of its own unless it is computed together with what reads it, as Inductor does with pointwise
    ops. It lives until its last read; a result of the graph lives to the end. What a backward takes in from its forward
    lives from the beginning, and what a forward takes in is the caller's.
    """
    is_backward = bool(names.gradients)
    position = {node: i for i, node in enumerate(graph.nodes)}
    gathered = _find_gathered(graph)
    last = _find_last_reads(graph, position)
    again = _find_again(graph) if is_backward else set()
    kept, made, away = ([0] * (len(position) + 1) for _ in range(3))
    for node, start in position.items():
        if node in gathered or is_view(node) or is_wait(node):
            continue
        is_fetched = node.op == "placeholder" and any(map(is_fetch, node.users))
        if is_offload(node) or is_fetched:
            away[0 if is_fetched else start] += size_bytes(node)
            away[last[node] + 1 if is_fetched else len(position)] -= size_bytes(node)
            continue
        if node.op == "placeholder":
            number = graph_input_position(node)
            if not is_backward or number in names.unsharded or number in names.shards:
                continue
        elif node.op != "call_function" or not _has_memory(node):
            continue
        each = made if node in again and not is_fetch(node) else kept
        each[start if node.op != "placeholder" else 0] += size_bytes(node)
        each[last[node] + 1] -= size_bytes(node)
    return Alive(*(list(accumulate(each[:-1])) for each in (kept, made, away)))


def _find_gathered(graph: fx.Graph) -> set[fx.Node]:
    """All-gathers, and what is only copied out of them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        is_copied = is_wait(node) or is_view(node) or is_rearrangement(node)
        if is_gather(node) or (inputs and is_copied and all(each in found for each in inputs)):
            found.add(node)
    return found


def _find_again(graph: fx.Graph) -> set[fx.Node]:
    """What does not depend on the first input, the gradient that compiled autograd hands over first."""
    first = next(iter(graph.find_nodes(op="placeholder")), None)
    behind = {first}
    for node in graph.nodes:
        if any(each in behind for each in node.all_input_nodes):
            behind.add(node)
    return {node for node in graph.nodes if node.op == "call_function" and node not in behind}


def _find_last_reads(graph: fx.Graph, position: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Where the memory of each node is read last: through views, and where what is fused with its readers is read."""
    last: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        passed = (last[user] if _is_passed_on(user) else position[user] for user in node.users)
        last[node] = max(passed, default=position[node])
    return last


def _is_passed_on(node: fx.Node) -> bool:
    return is_view(node) or is_wait(node) or (node.op == "call_function" and not _has_memory(node))


def _has_memory(node: fx.Node) -> bool:
    """Whether what a node computes is written to memory: for a kernel that is not fused, or as a sum of much more."""
    is_sum = any(size_bytes(each) > size_bytes(node) for each in node.all_input_nodes)
    return is_sum or not _is_fused(node) or any(not _is_fused(reader) for reader in _readers(node))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a node's result, or a view of it."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _is_fused(node: fx.Node) -> bool:
    """Whether a node is computed together with what reads it."""
    return isinstance(node.target, OpOverload) and is_fused(node.target) and not is_collective(node)
