"""Small Dynamo graphs of a forward under FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from compile_fsdp.passes import Costs
from compile_fsdp.passes.budget.read_step import read_step
from compile_fsdp.passes.budget.step_memory import Sharding, Step
from helpers.graphs.build import GraphBuilder

COSTS = Costs(latency=1e-3, comm_bandwidth=1e9, memory_bandwidth=1e10, flops=1e9)
RANKS, ROWS, DIM = 2, 256, 16
UNLIMITED = 10**12


class Forward:
    """A graph under construction, with an activation `x`, (rows, DIM), and matrices that are gathered."""

    def __init__(self, rows: int = ROWS, has_gradient: bool = False) -> None:
        self.build = GraphBuilder("example_value")
        self.call = self.build.call
        with self.build.fake_mode:
            self.x = self.build.input_like("x", torch.empty(rows, DIM, requires_grad=has_gradient) * 1)
        self.parameters: dict[fx.Node, Sharding] = {}

    def add_weight(self, name: str, group: int, shape: Sequence[int] = (DIM, DIM), trains: bool = True) -> fx.Node:
        """Add a matrix that is gathered with its group."""
        weight = self.build.input(name, shape, requires_grad=trains)
        size = self.build.value(weight).nbytes
        self.parameters[weight] = Sharding(group, size // RANKS, size)
        return weight

    def step(self, *outputs: fx.Node, fuses: bool = True) -> Step:
        return read_step(self.build.output(*outputs), self.parameters, fuses=fuses)


def saved_ops(step: Step) -> set[Any]:
    """Targets of the ops whose results the forward saves."""
    return {step.ops[value.made_at].target for value in step.values if value.is_saved}


def blocks(
    rows: int, count: int = 3, checkpointed: int = -1, trains: bool = True, activations: int = 1
) -> tuple[fx.Graph, dict[fx.Node, Sharding]]:
    """Build a forward of blocks x + gelu(x @ up) @ down, with a window per parameter and so many gelu in a row."""
    forward = Forward(rows)
    build, x = forward.build, forward.x
    shapes = ((4 * DIM, DIM), (DIM, 4 * DIM))
    groups = [
        [forward.add_weight(f"w{i}_{j}", i, shape, trains) for j, shape in enumerate(shapes)] for i in range(count)
    ]
    values = [build.input(f"v{j}", shape) for j, shape in enumerate(shapes)]
    for i, group in enumerate(groups):
        for weight, value in zip(group, values, strict=True):
            build.fill(weight, value)
        hidden = build.call(F.linear, x, group[0])
        for _ in range(activations):
            hidden = build.call(F.gelu, hidden)
        if i == checkpointed:
            hidden.meta["recompute"] = "as the user says"
        x = build.call(torch.add, x, build.call(F.linear, hidden, group[1]))
        for weight in group:
            build.free(weight)
    return build.output(build.call(torch.sum, x)), forward.parameters
