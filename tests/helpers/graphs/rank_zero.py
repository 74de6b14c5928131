"""Run graphs with collectives in one process, as rank 0 of a simulated world."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compile_fsdp.ops import all_gather_into_tensor, reduce_scatter_tensor
from compile_fsdp.passes.analysis.collectives import WAIT
from helpers.graphs.build import GATHER, REDUCE


class RankZero(fx.Interpreter):
    """Simulates ranks r whose tensors are (r + 1) times rank 0's."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (GATHER, all_gather_into_tensor):
            shard, ranks, *_ = args
            return torch.cat([shard * (rank + 1) for rank in range(ranks)])
        if target in (REDUCE, reduce_scatter_tensor):
            value, op, ranks, *_ = args
            total = value.view(ranks, -1)[0] * sum(range(1, ranks + 1))
            return total / ranks if op == "avg" else total
        return args[0] if target is WAIT else super().call_function(target, args, kwargs)


def run_rank_zero(graph: fx.Graph, *inputs: torch.Tensor) -> list[torch.Tensor]:
    assert graph.owning_module is not None
    with torch.no_grad():
        return list(RankZero(graph.owning_module).run(*[each.clone() for each in inputs]))
