"""Let a device graph (CUDA graph) replay the graph.

Precondition  the graph's only windows are open at its start or at its return, and its runner allocates the parameters
Match         resizes of parameters; collectives for which the graph does not wait
Rewrite       the resizes are erased, so that parameters are at one address in every step; the graph waits for all
              collectives, because a capture must not leave work on another stream
Report        resizes erased, waits added

    before                                    after
    resize_storage_bytes_(weight, 16)
    copy_(weight, gathered)                   copy_(weight, gathered)
    ahead = all_gather(shard)                 ahead = all_gather(shard)
                                              waited = wait_tensor(ahead)
    return ahead                              return waited
"""

from __future__ import annotations

from torch import fx

from compile_fsdp.passes.analysis.aliases import find_fake_tensor
from compile_fsdp.passes.analysis.collectives import WAIT, insert, is_collective, is_wait
from compile_fsdp.passes.analysis.effects import find_resizes
from compile_fsdp.passes.report import PassCounts


def make_replayable(graph: fx.Graph) -> PassCounts:
    """Erase the resizes that `remove_unshard_copies` has left, and wait for all collectives."""
    nodes, resizes = len(graph.nodes), [node for node in find_resizes(graph) if not node.users]
    for node in resizes:
        graph.erase_node(node)
    launched = [node for node in graph.nodes if is_collective(node) and find_fake_tensor(node) is not None]
    output, unawaited = graph.output_node(), [node for node in launched if not any(map(is_wait, node.users))]
    for node in unawaited:
        with graph.inserting_before(output):
            waited = insert(graph, WAIT, node, like=node)
        output.replace_input_with(node, waited)
    counts = ("resizes_erased", len(resizes)), ("waits_added", len(unawaited))
    return PassCounts(make_replayable.__name__, nodes, len(graph.nodes), counts)
