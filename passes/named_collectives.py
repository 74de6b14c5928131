"""Torch's own collectives while the passes run, the runtime's before and after.

Precondition  a post-grad graph
Match         `use_torch_collectives`: the gathers and reduce-scatters of ops/named_collectives.py;
              `use_named_collectives`: torch's, where they have a name; and every gather on the CPU
Rewrite       each becomes the other; the name is kept in meta[NAME] meanwhile
Report        nothing: there is no choice to make
"""

from __future__ import annotations

from torch import fx

from compile_fsdp.ops import all_gather_into_tensor, reduce_scatter_tensor
from compile_fsdp.passes.aliases import find_fake_tensor
from compile_fsdp.passes.collectives import GATHER, NAME, REDUCE

_NAMED = ((GATHER, all_gather_into_tensor), (REDUCE, reduce_scatter_tensor))


def use_torch_collectives(graph: fx.Graph) -> None:
    """Turn the runtime's collectives into torch's."""
    for torchs, named in _NAMED:
        for node in graph.find_nodes(op="call_function", target=named):
            *args, node.meta[NAME] = node.args
            node.target, node.args = torchs, tuple(args)


def use_named_collectives(graph: fx.Graph) -> None:
    """Turn them back; and those of the model's own code where torch's are not safe."""
    for torchs, named in _NAMED:
        for node in graph.find_nodes(op="call_function", target=torchs):
            name = node.meta.get(NAME, "")
            if name or (torchs is GATHER and _is_on_cpu(node)):
                node.target, node.args = named, (*node.args, name)


def _is_on_cpu(node: fx.Node) -> bool:
    # See [Note: Two gathers at a time end the process].
    tensor = find_fake_tensor(node)
    return tensor is not None and tensor.device.type == "cpu"
