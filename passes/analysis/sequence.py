"""The collectives of a graph, in the order in which they are issued, as text that ranks can compare."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from compile_fsdp.passes.analysis.aliases import fake_value
from compile_fsdp.passes.analysis.collectives import collective_arguments


@dataclass(frozen=True, slots=True)
class CollectiveSequence:
    """The collectives of a graph.

    Attributes:
        lines: One for each, equal on all ranks that issue the same. A process group is its number in `groups`.
        groups: Names of the process groups, in the order of their first use.
    """

    lines: tuple[str, ...]
    groups: tuple[str, ...]

    def after(self, earlier: CollectiveSequence) -> CollectiveSequence:
        """Together with collectives that are issued before these."""
        groups = dict.fromkeys((*self.groups, *earlier.groups))
        return CollectiveSequence((*earlier.lines, *self.lines), tuple(groups))


def read_collectives(graph: fx.Graph) -> CollectiveSequence:
    """The collectives of a graph of Dynamo's, with calls expanded, or of a post-grad graph."""
    lines = []
    groups: dict[str, int] = {}
    for node in graph.nodes:
        arguments = collective_arguments(node)
        if arguments is None:
            continue
        number = groups.setdefault(str(arguments["group_name"]), len(groups))
        label = f" for {arguments['name']}" if arguments.get("name") else ""
        kind = str(arguments["kind"])
        lines.append(f"{kind} of {_describe(node, kind)} in group {number}{label}")
    return CollectiveSequence(tuple(lines), tuple(groups))


def _describe(node: fx.Node, kind: str) -> str:
    tensors = [value for each in node.all_input_nodes if isinstance(value := fake_value(each), torch.Tensor)]
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}[{_numel(tensor, kind)}]" for tensor in tensors)


def _numel(tensor: torch.Tensor, kind: str) -> object:
    """What ranks must agree on: neither a size that is known in each step only, nor one that may differ by rank."""
    size = tensor.numel()
    return "any" if not isinstance(size, int) or kind.startswith("all_to_all") else size
