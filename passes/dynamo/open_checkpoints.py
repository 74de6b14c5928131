"""Take the gather, the free and the hooks of a sharded module out of a checkpoint that surrounds the module.

Precondition  a graph as Dynamo has traced it, with group calls
Match         a checkpoint whose body gathers before it reads the gathered parameters, frees after that, and puts hooks
              on its results only
Rewrite       what the runtime has added moves before and after the checkpoint, in its order; an alias of an input too
Report        nothing, because a checkpoint that stays only runs more ops again

    before                                    after
    y = checkpoint(body, shard, weight, x)    gathered = all_gather(copy_in(shard))
      body: gathered = all_gather(...)        wait_and_copy_out(gathered, weight)
            wait_and_copy_out(...)            y = checkpoint(body, weight, x)
            y = linear(x, weight)               body: y = linear(x, weight)
            free(weight)                      free(weight)
            register_hook(y, ...)             register_hook(y, ...)

`checkpoint(layer, x)` runs the hooks of FSDP2 in the body. When the backward runs the body again, the layer's
parameters are gathered already, as in eager FSDP2, because the hook on its result comes first. So only what the user
wrote has to run again. A body that stays as it is, such as one of two sharded modules, runs again with all that is in
it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from compile_fsdp.passes.analysis.collectives import is_gather
from compile_fsdp.passes.analysis.eager_effects import EagerEffects, is_grad_switch, is_upkeep
from compile_fsdp.passes.dynamo.drop_input_aliases import ALIAS, names_of, other_readers
from compile_fsdp.torch_compat.autograd import set_grad_enabled
from compile_fsdp.torch_compat.dispatch import is_checkpoint
from compile_fsdp.torch_compat.dynamo import deferred_hook

Function = Callable[..., Any]


def open_checkpoints(graph: fx.Graph, functions: Container[Function], free: Function) -> None:
    """Rewrite each checkpoint that matches.

    `functions` are the group calls; `free` is the one that frees parameters.
    """
    effects = EagerEffects(graph.owning_module)
    records = torch.is_grad_enabled()
    for node in list(graph.nodes):
        if is_grad_switch(node):
            records = bool(node.args[0])
        elif is_checkpoint(node) and (body := effects.subgraph(attribute := node.all_input_nodes[0])) is not None:
            frame = _find_frame(node, body.graph, functions, free) if len(attribute.users) == 1 else None
            if frame is not None:
                _open(node, body, *frame, records)


def _find_frame(
    call: fx.Node, body: fx.Graph, functions: Container[Function], free: Function
) -> tuple[list[fx.Node], dict[fx.Node, fx.Node], list[fx.Node]] | None:
    """Find a body's gathers, aliases of inputs, and frees and hooks; None if it has no gather, or if any would stay."""
    before = [node for node in body.nodes if (node.target in functions and node.target is not free) or is_gather(node)]
    frees = body.find_nodes(op="call_function", target=free)
    hooks = [node for node in body.nodes if deferred_hook(node) is not None]
    found = {node: _input_of(node) for node in body.find_nodes(op="call_function", target=ALIAS)}
    aliases = {node: tensor for node, tensor in found.items() if tensor is not None}
    own = {*before, *frees, *hooks}
    parameters = {each for node in before for each in node.all_input_nodes if each.op == "placeholder"}
    reads = [node for node in body.nodes if node not in own and not parameters.isdisjoint(node.all_input_nodes)]
    items = _items(call, body)
    is_whole = (
        before
        and all(each in own or each.op == "placeholder" for node in before for each in node.all_input_nodes)
        and all(user in own for node in before for user in node.users)
        and all(before[-1] < each for each in (*reads, *frees))
        and all(each < node for each in reads for node in frees)
        and all(
            each.op == "placeholder" or each in (*items, *aliases) for node in hooks for each in node.all_input_nodes
        )
        and not any(map(is_upkeep, body.nodes))
    )
    return (before, aliases, [*frees, *hooks]) if is_whole else None


def _input_of(alias: fx.Node) -> fx.Node | None:
    """Return the input of the body that an alias alone reads, if any."""
    names = names_of(alias.all_input_nodes[0])
    inputs = [node for node in names if node.op == "placeholder"]
    return inputs[0] if inputs and not other_readers(alias, names) else None


def _items(call: fx.Node, body: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map results of a body to the nodes of the outer graph that hold them."""
    results: Any = body.output_node().args[0]
    return {results[user.args[1]]: user for user in call.users}


def _open(
    call: fx.Node,
    body: fx.GraphModule,
    before: Sequence[fx.Node],
    aliases: Mapping[fx.Node, fx.Node],
    after: Sequence[fx.Node],
    records: bool,
) -> None:
    """Move nodes before and after a call out of its body; `records`: whether autograd records where the call stands."""
    graph, placeholders = call.graph, body.graph.find_nodes(op="placeholder")
    outside: dict[fx.Node, Any] = {**_items(call, body.graph), **dict(zip(placeholders, call.args[1:], strict=True))}
    with graph.inserting_before(call):
        if records:
            graph.call_function(set_grad_enabled, (False,))
        for node in before:
            outside[node] = graph.node_copy(node, outside.__getitem__)
        if records:
            graph.call_function(set_grad_enabled, (True,))
        for node, tensor in aliases.items():
            alias = graph.call_function(ALIAS, (outside[tensor],))
            alias.meta, outside[tensor], outside[node] = node.meta, alias, alias
    with graph.inserting_before(max([call, *call.users]).next):
        for node in after:
            graph.node_copy(node, outside.__getitem__)
    for node in reversed([*before, *after]):
        body.graph.erase_node(node)
    for node in aliases:
        node.replace_all_uses_with(node.all_input_nodes[0])
        body.graph.erase_node(node)
    _erase_idle_switches(body.graph, records)
    call.args = (call.args[0], *(outside[node] for node in placeholders if node.users))
    for node in placeholders:
        if not node.users:
            body.graph.erase_node(node)
    body.recompile()


def _erase_idle_switches(graph: fx.Graph, records: bool) -> None:
    """Erase switches of autograd that no op follows, or that change nothing."""
    for node in list(filter(is_grad_switch, graph.nodes)):
        if is_grad_switch(node.next) or bool(node.args[0]) == records:
            graph.erase_node(node)
        else:
            records = bool(node.args[0])
