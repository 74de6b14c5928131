"""Leave unsharded parameters allocated, so that a device graph finds them at the same address in every step.

Precondition  the graph's only windows are open at its start or at its return, and its runner allocates the parameters
Match         resizes of parameters
Rewrite       the resizes are erased
Report        resizes erased

    before                                    after
    resize_storage_bytes_(weight, 16)
    copy_(weight, gathered)                   copy_(weight, gathered)
"""

from __future__ import annotations

from torch import fx

from compile_fsdp.passes.analysis.effects import find_resizes
from compile_fsdp.passes.report import PassCounts


def keep_memory(graph: fx.Graph) -> PassCounts:
    """Erase the resizes that `remove_unshard_copies` has left."""
    nodes, resizes = len(graph.nodes), [node for node in find_resizes(graph) if not node.users]
    for node in resizes:
        graph.erase_node(node)
    return PassCounts(keep_memory.__name__, nodes, len(graph.nodes), (("resizes_erased", len(resizes)),))
