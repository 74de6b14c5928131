"""Unsharded parameters that a forward writes while they are gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch import fx

from compile_fsdp.passes.analysis.aliases import fake_value, storage_keys
from compile_fsdp.passes.analysis.eager_effects import (
    EagerEffects,
    is_embedding,
    is_torch_function,
    is_upkeep,
    target_name,
)
from compile_fsdp.passes.analysis.effects import get_argument, nodes_in
from compile_fsdp.passes.analysis.layout import find_freed
from compile_fsdp.passes.analysis.subgraphs import graph_and_bodies
from compile_fsdp.torch_compat.dispatch import OpOverload, OpOverloadPacket


def find_refused_writes(
    gm: fx.GraphModule, parameters: Iterable[fx.Node], free: Callable[..., Any] | None = None
) -> set[fx.Node]:
    """Find parameters that a Dynamo forward writes and frees, or renormalizes.

    AOTAutograd moves a write of an input to the end of the graph, behind the resize(0) that frees it. If the graph
    fills an embedding table and renormalizes it, AOTAutograd makes the renormalization a copy into a copy, which it
    then refuses (torch 2.13.0).

    Only proven writes count; functions outside of torch may write more. `free` is the group call that frees parameters
    in the bodies of higher-order ops.
    """
    by_storage = {key: node for node in parameters for key in _storages(node)}
    found: set[fx.Node] = set()
    effects = EagerEffects(None)
    # The bodies of higher-order ops share the graph's fake tensors.
    graphs = [each.graph for each in graph_and_bodies(gm)] if by_storage else []
    freed_nodes = filter(None, chain.from_iterable(map(find_freed, graphs)))
    calls = (node for each in graphs for node in each.nodes if node.op == "call_function" and node.target is free)
    freed = {key for node in (*freed_nodes, *nodes_in([call.args for call in calls])) for key in _storages(node)}
    for node in chain.from_iterable(each.nodes for each in graphs):
        if node.op not in ("call_function", "call_method") or is_upkeep(node):
            continue
        for written in _written(node, effects):
            for key in _storages(written):
                if key in by_storage and (key in freed or is_embedding(node)):
                    found.add(by_storage[key])
    return found


def _written(node: fx.Node, effects: EagerEffects) -> Sequence[fx.Node]:
    if isinstance(node.target, (OpOverload, OpOverloadPacket)):
        return effects.written_inputs(node)
    if not is_torch_function(node):
        return ()
    if is_embedding(node):
        max_norm = node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")
        return () if max_norm is None else tuple(nodes_in(get_argument(node, 1, "weight")))
    if target_name(node).endswith(("batch_norm", "instance_norm")):
        return ()  # they write only statistics
    return effects.written_inputs(node)


def _storages(node: fx.Node) -> Iterator[int]:
    return (key for key in storage_keys(fake_value(node)) if key is not None)
