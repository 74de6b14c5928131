"""A small Dynamo graph of a forward under FSDP2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

from compile_fsdp.passes import Costs
from compile_fsdp.passes.budget.step_memory import Sharding
from helpers.graphs.build import GraphBuilder

COSTS = Costs(latency=1e-3, comm_bandwidth=1e9, memory_bandwidth=1e10, flops=1e9)
RANKS, DIM = 2, 16
UNLIMITED = 10**12


def blocks(
    rows: int, count: int = 3, checkpointed: int = -1, trains: bool = True, activations: int = 1
) -> tuple[fx.Graph, dict[fx.Node, Sharding]]:
    """Build a forward of blocks x + gelu(x @ up) @ down, with a window per parameter and so many gelu in a row."""
    build = GraphBuilder(meta_key="example_value")
    parameters: dict[fx.Node, Sharding] = {}
    with build.fake_mode:
        x = build.input_like("x", torch.empty(rows, DIM))
        shapes = ((4 * DIM, DIM), (DIM, 4 * DIM))
        groups = [
            [build.input_like(f"w{i}_{j}", torch.empty(shape, requires_grad=trains)) for j, shape in enumerate(shapes)]
            for i in range(count)
        ]
        values = [build.input_like(f"v{j}", torch.empty(shape)) for j, shape in enumerate(shapes)]
    for i, group in enumerate(groups):
        for weight, value in zip(group, values, strict=True):
            size = build.value(weight).nbytes
            parameters[weight] = Sharding(i, size // RANKS, size)
            build.fill(weight, value)
        hidden = build.call(F.linear, x, group[0])
        for _ in range(activations):
            hidden = build.call(F.gelu, hidden)
        if i == checkpointed:
            hidden.meta["recompute"] = "as the user says"
        x = build.call(torch.add, x, build.call(F.linear, hidden, group[1]))
        for weight in group:
            build.free(weight)
    return build.output(build.call(torch.sum, x)), parameters
