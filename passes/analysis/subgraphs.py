"""Subgraphs that a pass may rewrite by themselves, nodes that lead to one another, and copies of ops.

[Note: A subgraph is rewritten if no call aliases its inputs]
A higher-order op's subgraph sees its operands as placeholders, and several calls may run it. The fake values in it
describe the aliases only if no call passes one storage twice, so each call is checked in the graph that contains it. A
subgraph stays as it is if any node but a higher-order op uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from compile_fsdp.passes.analysis.aliases import Aliases
from compile_fsdp.passes.analysis.effects import Effects, find_resizes, nodes_in
from compile_fsdp.torch_compat.dispatch import HigherOrderOperator


def graph_and_bodies(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """Return a graph, and the graphs that its higher-order ops run, at any depth."""
    return [each for each in gm.modules() if isinstance(each, fx.GraphModule)]


def find_window_subgraphs(graph: fx.Graph) -> list[tuple[str, fx.GraphModule]]:
    """Return (attribute path, module) of subgraphs with resizes and private inputs, inner subgraphs first."""
    visited: set[int] = set()  # by id of the module
    found: dict[int, tuple[str, fx.GraphModule]] = {}
    shared: set[int] = set()

    def visit(graph: fx.Graph, path: str) -> None:
        effects = Effects(graph.owning_module)
        aliases: Aliases | None = None
        for node in graph.find_nodes(op="get_attr"):
            if (module := effects.subgraph(node)) is None:
                continue
            inner_path = f"{path}{node.target}"
            if id(module) not in visited:
                visited.add(id(module))
                visit(module.graph, f"{inner_path}.")
                if find_resizes(module.graph):
                    found[id(module)] = (inner_path, module)
            if id(module) in found:
                aliases = aliases or Aliases(graph, effects)
                if not all(_is_private_call(user, aliases) for user in node.users):
                    shared.add(id(module))

    visit(graph, path="")
    return [(path, module) for path, module in found.values() if id(module) not in shared]


def _is_private_call(node: fx.Node, aliases: Aliases) -> bool:
    if not isinstance(node.target, HigherOrderOperator):
        return False
    keys = list(aliases.classes_of(nodes_in((node.args, node.kwargs))))
    return len(keys) == len(set(keys))


def reached(nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Return the nodes, and all nodes that `following` leads to from them, directly or through others."""
    found = set(nodes)
    stack = list(found)
    while stack:
        new = set(following(stack.pop())) - found
        found |= new
        stack += new
    return found


def copy_ops(inputs: Iterable[fx.Node], ops: Iterable[fx.Node], results: Iterable[fx.Node]) -> fx.Graph:
    """Copy ops to a graph of their own."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in ops:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    return graph
