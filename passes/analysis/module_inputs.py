"""Aliases through which a sharded module reads its inputs; see [Note: Inputs of a module]."""

from __future__ import annotations

import torch
from torch import fx

from compile_fsdp.passes.analysis.aliases import fake_value

ALIAS = torch.ops.aten.alias.default


def names_of(tensor: fx.Node) -> set[fx.Node]:
    """Return all nodes that return the same tensor, such as a cast to its own dtype."""
    names: set[fx.Node] = set()
    nodes = [tensor]
    while nodes:
        node = nodes.pop()
        if node not in names and fake_value(node) is fake_value(tensor):
            names.add(node)
            nodes += [*node.all_input_nodes, *node.users]
    return names


def other_readers(alias: fx.Node, names: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes besides an alias that read its tensor. `names`: of the tensor."""
    return {user for node in names for user in node.users} - names - {alias}
