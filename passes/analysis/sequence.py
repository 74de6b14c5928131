"""Collectives of a graph in issue order, as comparable text."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from compile_fsdp.passes.analysis.aliases import find_fake_tensor
from compile_fsdp.passes.analysis.collectives import collective_arguments

_GROUP = "{group}"  # stands for a process group's number


@dataclass(frozen=True, slots=True)
class CollectiveSequence:
    """Collectives of a graph, in issue order."""

    calls: tuple[tuple[str, str], ...]  # (description, name of the process group)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the process groups, in the order of their first use."""
        return tuple(dict.fromkeys(group for _, group in self.calls))

    def lines(self, groups: Collection[str]) -> tuple[str, ...]:
        """Return the collectives in some process groups, as lines of text that are comparable between ranks.

        Names of process groups differ from rank to rank, so a line shows a group's number in the order of first use.
        """
        numbers: dict[str, int] = {}
        shown = [(text, numbers.setdefault(name, len(numbers))) for text, name in self.calls if name in groups]
        return tuple(text.replace(_GROUP, f"group {number}") for text, number in shown)

    def after(self, earlier: CollectiveSequence) -> CollectiveSequence:
        """Return the sequence of `earlier`, followed by this sequence."""
        return CollectiveSequence((*earlier.calls, *self.calls))


def read_collectives(graph: fx.Graph) -> CollectiveSequence:
    """Read the collectives of an expanded Dynamo graph, or a post-grad graph."""
    calls = []
    for node in graph.nodes:
        if (arguments := collective_arguments(node)) is None:
            continue
        label = f" for {arguments['name']}" if arguments.get("name") else ""
        kind = str(arguments["kind"])
        tensors = [tensor for each in node.all_input_nodes if (tensor := find_fake_tensor(each)) is not None]
        sent = ", ".join(f"{str(each.dtype).removeprefix('torch.')}[{_numel(each, kind)}]" for each in tensors)
        calls.append((f"{kind} of {sent} in {_GROUP}{label}", str(arguments["group_name"])))
    return CollectiveSequence(tuple(calls))


def _numel(tensor: torch.Tensor, kind: str) -> object:
    """Return the size that ranks must agree on; "any" if symbolic, or of an all-to-all, which may differ by rank."""
    size = tensor.numel()
    return "any" if not isinstance(size, int) or kind.startswith("all_to_all") else size
