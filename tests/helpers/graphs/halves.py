"""Graphs of a checkpoint's forward and backward, from AOTAutograd's partitioner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from compile_fsdp.torch_compat.inductor import compile_op_by_op, min_cut_partition


def checkpoint_halves(body: Callable[[Tensor], Tensor]) -> list[fx.Graph]:
    """Return both graphs of a checkpoint around a function of a tensor of shape (1, 1, 2, 8)."""
    halves: list[fx.GraphModule] = []

    def partition(*args: Any, **kwargs: Any) -> Any:
        halves.extend(min_cut_partition(*args, **kwargs))
        return halves

    def compile_graph(gm: fx.GraphModule, inputs: Any) -> Any:
        return compile_op_by_op(gm, inputs, partition)

    def run(x: Tensor) -> Tensor:
        return checkpoint(body, x, use_reentrant=False)

    torch._dynamo.reset()
    torch.compile(run, backend=compile_graph, fullgraph=True)(torch.ones(1, 1, 2, 8, requires_grad=True))
    return [half.graph for half in halves]
