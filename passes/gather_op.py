"""One op for all-gathers while the passes run.

Precondition  a post-grad graph
Match         `use_torch_gathers`: our all-gathers; `use_safe_gathers`: torch's, on the CPU
Rewrite       each becomes the other; the other passes know torch's alone
Report        nothing: these two have no choice to make

See [Note: Two gathers at a time end the process] in ops/all_gather.py.
"""

from __future__ import annotations

from torch import fx

from compile_fsdp.ops import all_gather_into_tensor
from compile_fsdp.passes.aliases import find_fake_tensor
from compile_fsdp.passes.collectives import GATHER


def use_torch_gathers(graph: fx.Graph) -> None:
    """Turn the runtime's gathers into torch's."""
    for node in graph.find_nodes(op="call_function", target=all_gather_into_tensor):
        node.target = GATHER


def use_safe_gathers(graph: fx.Graph) -> None:
    """Turn gathers on the CPU, also those that the model's own code issues, into the op that is safe with gloo."""
    for node in graph.find_nodes(op="call_function", target=GATHER):
        tensor = find_fake_tensor(node)
        if tensor is not None and tensor.device.type == "cpu":
            node.target = all_gather_into_tensor
