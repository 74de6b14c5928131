"""Unsharded parameters that a forward writes while they are gathered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

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
from compile_fsdp.torch_compat.dispatch import OpOverload, OpOverloadPacket


def find_refused_writes(graph: fx.Graph, parameters: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Find parameters that the graph writes and frees, or renormalizes.

    AOTAutograd moves a write of an input to the end of the graph, behind the resize(0) that frees it. If the graph
    fills an embedding table and renormalizes it, AOTAutograd makes the renormalization a copy into a copy, which it
    then refuses (torch 2.13.0).

    Returns the first node that writes each of these placeholders of a Dynamo forward. Only proven writes count;
    functions outside of torch may write more.
    """
    freed = find_freed(graph)
    by_storage = {key: node for node in parameters for key in _storages(node)}
    found: dict[fx.Node, fx.Node] = {}
    effects = EagerEffects(None)
    for node in _writers(graph, by_storage):
        for written in _written(node, effects):
            for key in _storages(written):
                if key in by_storage and (by_storage[key] in freed or is_embedding(node)):
                    found.setdefault(by_storage[key], node)
    return found


def _writers(graph: fx.Graph, by_storage: Mapping[int, fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes that compute, also in the bodies of higher-order ops, which share the graph's fake tensors."""
    effects = EagerEffects(graph.owning_module)
    for node in graph.nodes if by_storage else ():
        if (body := effects.subgraph(node)) is not None:
            yield from _writers(body.graph, by_storage)
        elif node.op in ("call_function", "call_method") and not is_upkeep(node):
            yield node


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
