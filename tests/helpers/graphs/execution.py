"""Run graphs on real CPU tensors, whose storages are freed and filled."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx


def freed(*shape: int) -> torch.Tensor:
    """Return a tensor without memory, like an unsharded parameter outside its windows."""
    tensor = torch.zeros(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def storage_sizes(inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.untyped_storage().nbytes() for name, tensor in inputs.items()}


def run(graph: fx.Graph, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Run a graph and return its results except those that are inputs."""
    assert graph.owning_module is not None
    names = [str(node.target) for node in graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        results = fx.Interpreter(graph.owning_module).run(*(inputs[name] for name in names))
    given = {id(tensor) for tensor in inputs.values()}
    return [result for result in results if id(result) not in given]
