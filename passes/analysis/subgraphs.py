"""Subgraphs that a pass may rewrite by themselves.

[Note: A subgraph is rewritten if no call aliases its inputs]
A higher-order op's subgraph sees its operands as placeholders, and several calls may run it. The fake values in it
describe the aliases only if no call passes one storage twice, so each call is checked in the graph that contains it. A
subgraph stays as it is if any node but a higher-order op uses it.
"""

from __future__ import annotations

from torch import fx

from compile_fsdp.passes.analysis.aliases import Aliases
from compile_fsdp.passes.analysis.effects import Effects, find_resizes, nodes_in
from compile_fsdp.torch_compat.dispatch import HigherOrderOperator


def find_window_subgraphs(graph: fx.Graph) -> list[tuple[str, fx.GraphModule]]:
    """Return (attribute path, module) of subgraphs with resizes and private inputs, inner subgraphs first."""
    search = _Search()
    search.visit(graph, path="")
    return [(path, module) for path, module in search.found.values() if id(module) not in search.shared]


class _Search:
    def __init__(self) -> None:
        self.found: dict[int, tuple[str, fx.GraphModule]] = {}
        self.shared: set[int] = set()
        self._visited: set[int] = set()

    def visit(self, graph: fx.Graph, path: str) -> None:
        effects = Effects(graph.owning_module)
        aliases: Aliases | None = None
        for node in graph.find_nodes(op="get_attr"):
            if (module := effects.subgraph(node)) is None:
                continue
            inner_path = f"{path}{node.target}"
            if id(module) not in self._visited:
                self._visited.add(id(module))
                self.visit(module.graph, f"{inner_path}.")
                if find_resizes(module.graph):
                    self.found[id(module)] = (inner_path, module)
            if id(module) in self.found:
                aliases = aliases or Aliases(graph, effects)
                if not all(_is_private_call(user, aliases) for user in node.users):
                    self.shared.add(id(module))


def _is_private_call(node: fx.Node, aliases: Aliases) -> bool:
    if not isinstance(node.target, HigherOrderOperator):
        return False
    keys = list(aliases.classes_of(nodes_in((node.args, node.kwargs))))
    return len(keys) == len(set(keys))
