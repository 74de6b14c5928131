"""Describe a graph by its ops and constants, to compare it with the graphs of other ranks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from compile_fsdp.passes.analysis.subgraphs import graph_and_bodies

_PLAIN = (type(None), bool, int, float, complex, torch.dtype, torch.layout, torch.memory_format)


def graph_text(gm: fx.GraphModule, groups: Collection[str]) -> str:
    """Return the ops of a Dynamo graph and of its subgraphs, with their constants.

    Ranks that compute the same have equal texts: a device is shown without its number, and each of the process groups
    in `groups` as a number in the order of first use. Of other objects, only the class is shown.
    """
    numbers: dict[str, int] = {}

    def describe(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{value.name}"
        if isinstance(value, str):
            return f"group {numbers.setdefault(value, len(numbers))}" if value in groups else repr(value)
        if isinstance(value, torch.device):
            return value.type
        return repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__

    lines = []
    for node in (node for each in graph_and_bodies(gm) for node in each.graph.nodes):
        arguments = fx.node.map_aggregate((node.args, node.kwargs), describe)
        lines.append(f"{node.name} {_name(node.target)} {arguments}")
    return "\n".join(lines)


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__qualname__", type(target).__qualname__)
