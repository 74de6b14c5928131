"""Drop the aliases of module inputs that change no sum of gradients.

Precondition  a forward graph, as Dynamo has traced it, after the tensor hooks are lifted
Match         an alias that alone reads its tensor, and that no hook, output or in-place op reads
Rewrite       the readers of the alias read the tensor
Report        nothing, because an alias that stays changes no result

See [Note: Inputs of a module].
"""

from __future__ import annotations

import torch
from torch import fx

from compile_fsdp.ops import watch
from compile_fsdp.passes.analysis.aliases import fake_value
from compile_fsdp.passes.analysis.eager_effects import EagerEffects, is_upkeep
from compile_fsdp.passes.analysis.subgraphs import reached
from compile_fsdp.torch_compat.dynamo import deferred_hook

ALIAS = torch.ops.aten.alias.default


def drop_input_aliases(graph: fx.Graph) -> None:
    """Drop aliases that change nothing, also in bodies of ops."""
    effects = EagerEffects(graph.owning_module)
    _drop(graph)
    for body in filter(None, map(effects.subgraph, graph.nodes)):
        _drop(body.graph, is_body=True)
        body.recompile()


def _drop(graph: fx.Graph, is_body: bool = False) -> None:
    effects = EagerEffects(graph.owning_module)
    for alias in graph.find_nodes(op="call_function", target=ALIAS):
        (tensor,) = alias.all_input_nodes
        names = names_of(tensor)
        others = (node for node in other_readers(alias, names) if not is_upkeep(node))
        has_other_readers = any(node.target is not watch and deferred_hook(node) is None for node in others)
        may_have_more = is_body and any(node.op == "placeholder" for node in names)  # outside of the body
        # The written inputs of a hook's call contain the hook's tensor, too.
        is_only_read = all(user.op != "output" and alias not in effects.written_inputs(user) for user in alias.users)
        if has_other_readers or may_have_more or not is_only_read:
            continue
        alias.replace_all_uses_with(tensor)
        graph.erase_node(alias)


def names_of(tensor: fx.Node) -> set[fx.Node]:
    """Return all nodes that return the same tensor, such as a cast to its own dtype."""
    value = fake_value(tensor)
    return reached([tensor], lambda node: (n for n in (*node.all_input_nodes, *node.users) if fake_value(n) is value))


def other_readers(alias: fx.Node, names: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes besides an alias that read its tensor. `names`: of the tensor."""
    return {user for node in names for user in node.users} - names - {alias}
