"""Save what the forward computes from an input that it writes later, instead of recomputing it from the new value.

Precondition  a forward graph, as Dynamo has traced it
Match         ops on an input, such as a buffer, before a later op writes it
Rewrite       AOTAutograd's partitioner may not compute them again in the backward

AOTAutograd writes inputs at the end of the forward, and would let the backward read the input itself. Eager code fails
where a backward needs such an input, so the results are all that a backward can need. The body of a checkpoint is run
again on the new value, as in eager code.

    difference = sub(x, center)               saved, if the backward needs it
    add_(center, 1)
"""

from __future__ import annotations

from torch import fx

from compile_fsdp.passes.analysis.aliases import Aliases
from compile_fsdp.passes.analysis.eager_effects import EagerEffects, is_upkeep
from compile_fsdp.torch_compat.dispatch import HigherOrderOperator
from compile_fsdp.torch_compat.dynamo import ban_recomputation


def save_before_writes(graph: fx.Graph) -> None:
    """Mark results of inputs that are written later to be saved if needed."""
    effects = EagerEffects(graph.owning_module)
    aliases = Aliases(graph, effects)
    inputs = set(aliases.classes_of(node for node in graph.nodes if node.op in ("placeholder", "get_attr")))
    written: set[int] = set()  # by a later op
    for node in reversed(graph.nodes):
        if is_upkeep(node):
            continue
        is_read = not written.isdisjoint(aliases.classes_of(node.all_input_nodes))
        # A view of an input is the input itself; only ops that compute with the view are marked.
        if is_read and written.isdisjoint(aliases.classes(node)) and not isinstance(node.target, HigherOrderOperator):
            ban_recomputation(node)
        written.update(inputs.intersection(aliases.classes_of(effects.written_inputs(node))))
