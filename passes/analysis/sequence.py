"""The collectives of a graph, in the order in which they are issued, as text that ranks can compare."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from compile_fsdp.passes.analysis.aliases import fake_value
from compile_fsdp.passes.analysis.collectives import collective_arguments

_GROUP = "{group}"  # stands for a process group's number

@dataclass(frozen=True, slots=True)
class CollectiveSequence:
    """The collectives of a graph.

    Attributes:
        calls: By collective, what it does, and the name of its process group.
    """

    calls: tuple[tuple[str, str], ...]

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the process groups, in the order of their first use."""
        return tuple(dict.fromkeys(group for _, group in self.calls))

    def lines(self, groups: Collection[str]) -> tuple[str, ...]:
        """The collectives in some process groups, equal on all ranks that issue the same ones there.

        Names of process groups differ from rank to rank, so a group is shown by its number in the order of first use.
        """
        numbers: dict[str, int] = {}
        shown = [(text, numbers.setdefault(name, len(numbers))) for text, name in self.calls if name in groups]
        return tuple(text.replace(_GROUP, f"group {number}") for text, number in shown)

    def after(self, earlier: CollectiveSequence) -> CollectiveSequence:
        """Together with collectives that are issued before these."""
        return CollectiveSequence((*earlier.calls, *self.calls))


def read_collectives(graph: fx.Graph) -> CollectiveSequence:
    """The collectives of a graph of Dynamo's, with calls expanded, or of a post-grad graph."""
    calls = []
    for node in graph.nodes:
        arguments = collective_arguments(node)
        if arguments is None:
            continue
        label = f" for {arguments['name']}" if arguments.get("name") else ""
        kind = str(arguments["kind"])
        calls.append((f"{kind} of {_describe(node, kind)} in {_GROUP}{label}", str(arguments["group_name"])))
    return CollectiveSequence(tuple(calls))


def _describe(node: fx.Node, kind: str) -> str:
    tensors = [value for each in node.all_input_nodes if isinstance(value := fake_value(each), torch.Tensor)]
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}[{_numel(tensor, kind)}]" for tensor in tensors)


def _numel(tensor: torch.Tensor, kind: str) -> object:
    """What ranks must agree on: neither a size that is known in each step only, nor one that may differ by rank."""
    size = tensor.numel()
    return "any" if not isinstance(size, int) or kind.startswith("all_to_all") else size
