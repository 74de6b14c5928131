"""Parameters that a backward graph reads but does not fill."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from compile_fsdp.ops import accumulate_gradient
from compile_fsdp.passes.analysis.aliases import Aliases
from compile_fsdp.passes.analysis.eager_effects import EagerEffects, is_passed_through, is_upkeep
from compile_fsdp.passes.analysis.effects import is_copy, parameter_of


def find_unfilled_reads(graph: fx.Graph, parameters: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the unsharded parameters (placeholders or their items) that a Dynamo-level graph reads and never fills."""
    filled = {parameter_of(node) for node in graph.nodes if is_copy(node)}
    unfilled = [parameter for parameter in parameters if parameter not in filled]
    if not unfilled:
        return []
    aliases = Aliases(graph, EagerEffects(graph.owning_module))
    # Gradient accumulation reads only the layout of the parameter.
    computing = (node for node in graph.nodes if node.op != "output" and node.target is not accumulate_gradient)
    readers = (node for node in computing if not is_upkeep(node) and not is_passed_through(node))
    read = set(aliases.classes_of(source for node in readers for source in node.all_input_nodes))
    return [parameter for parameter in unfilled if not read.isdisjoint(aliases.classes(parameter))]
