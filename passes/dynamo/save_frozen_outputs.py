"""Save outputs of frozen layers for the backward instead of recomputing them.

Precondition  a forward graph, as Dynamo has traced it
Match         ops on frozen parameters, whose results need no gradient
Rewrite       AOTAutograd's partitioner may not compute them again in the backward

Eager code saves them, too. No gradient passes through such layers, so no hook gathers their parameters in the backward,
and recomputing would need an all-gather. And the partitioner weighs activations, so ranks whose batches differ in size
would not agree on the ops. The body of a checkpoint is a separate graph, and is recomputed as the user asks.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from compile_fsdp.passes.analysis.aliases import Aliases, fake_value
from compile_fsdp.passes.analysis.eager_effects import EagerEffects
from compile_fsdp.torch_compat.dispatch import HigherOrderOperator, tree_leaves
from compile_fsdp.torch_compat.dynamo import ban_recomputation


def save_frozen_outputs(graph: fx.Graph, frozen: Collection[fx.Node]) -> None:
    """Mark gradient-free results of frozen parameters to be saved if needed.

    `frozen`: placeholders of unsharded parameters that need no gradient.
    """
    if not frozen:
        return
    aliases = Aliases(graph, EagerEffects(graph.owning_module))
    parameters = set(aliases.classes_of(frozen))
    for node in graph.nodes:
        tensors = [value for value in tree_leaves(fake_value(node)) if isinstance(value, torch.Tensor)]
        needs_gradient = any(tensor.requires_grad for tensor in tensors)
        if isinstance(node.target, HigherOrderOperator) or needs_gradient or not tensors:
            continue
        # A view of a parameter is the parameter itself; only ops that compute with the view are marked.
        is_read = not parameters.isdisjoint(aliases.classes_of(node.all_input_nodes))
        if is_read and parameters.isdisjoint(aliases.classes(node)):
            ban_recomputation(node)
