"""Save for the backward what frozen layers compute, as eager code does, rather than compute it again.

Precondition  a forward graph, as Dynamo has traced it
Match         ops on frozen parameters, whose results need no gradient
Rewrite       AOTAutograd's partitioner may not compute them again in the backward

No hook gathers the parameters of such layers in the backward, since no gradient passes through: computing them again
would need an all-gather that eager FSDP2 does without. And the partitioner weighs activations, so ranks whose batches
differ in size would not agree on it. The body of a checkpoint is another graph, and computed again as the user asks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from compile_fsdp.compat import HigherOrderOperator, ban_recomputation
from compile_fsdp.passes.aliases import Aliases, fake_value
from compile_fsdp.passes.eager_effects import EagerEffects, is_upkeep


def save_frozen_outputs(graph: fx.Graph, frozen: Iterable[fx.Node]) -> int:
    """Mark what is computed of frozen parameters, and needs no gradient, to be saved if the backward needs it.

    Args:
        graph: The graph, with fake values under meta["example_value"].
        frozen: Placeholders: unsharded parameters that need no gradient.
    Returns:
        How many ops were marked.
    """
    frozen = list(frozen)
    if not frozen:
        return 0
    aliases = Aliases(graph, EagerEffects(graph.owning_module))
    parameters = {key for node in frozen for key in aliases.classes(node)}
    count = 0
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or isinstance(node.target, HigherOrderOperator):
            continue
        reads = any(not parameters.isdisjoint(aliases.classes(source)) for source in node.all_input_nodes)
        # A view of a parameter is the parameter itself; what computes with the view is marked.
        is_view = not parameters.isdisjoint(aliases.classes(node))
        if reads and not is_view and not is_upkeep(node) and not _needs_gradient(node):
            ban_recomputation(node)
            count += 1
    return count


def _needs_gradient(node: fx.Node) -> bool:
    values: list[object] = []
    fx.node.map_aggregate(fake_value(node), values.append)  # type: ignore[arg-type]  # It maps anything.
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
