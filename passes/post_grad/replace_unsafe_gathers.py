"""Replace the model's own all-gathers by the runtime's op.

Precondition  a post-grad graph
Match         torch's functional all-gather of a tensor on the CPU
Rewrite       the runtime's op takes its place, without a name
Report        gathers replaced

    before                                          after
    %0 = c10d.all_gather_into_tensor(x, 2, 'tp')    %0 = compile_fsdp.all_gather_into_tensor(x, 2, 'tp', '')

gloo can run several of the runtime's gathers at a time. See [Note: Two gathers at a time end the process].
"""

from __future__ import annotations

from torch import fx

from compile_fsdp.ops import all_gather_into_tensor
from compile_fsdp.passes.analysis.aliases import find_fake_tensor
from compile_fsdp.passes.analysis.collectives import is_gather
from compile_fsdp.passes.report import PassCounts


def replace_unsafe_gathers(graph: fx.Graph) -> PassCounts:
    """Replace torch's all-gathers on the CPU; a gather on an unknown device stays."""
    nodes, replaced = len(graph.nodes), 0
    for node in graph.nodes:
        if is_gather(node) and node.target is not all_gather_into_tensor:
            tensor = find_fake_tensor(node)
            if tensor is not None and tensor.device.type == "cpu":
                node.target, node.args = all_gather_into_tensor, (*node.args, "")
                replaced += 1
    return PassCounts(replace_unsafe_gathers.__name__, nodes, nodes, (("gathers_replaced", replaced),))
