"""Graphs of worlds that are larger than any test machine, traced in one process on the fake process group."""

from __future__ import annotations

import torch
from torch import nn

import compile_fsdp
from capture import events, render_step
from harness import fake_world


def _graphs(world_size: int, rank: int) -> list[str]:
    """Of one rank, whose shards are padded, and empty on the last ranks of a large world."""
    with fake_world(world_size, rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 12, bias=False), nn.Tanh(), nn.Linear(12, 2, bias=False))
        for module in (model[0], model[2], model):
            compile_fsdp.fully_shard(module)
        return render_step(model, lambda: model(torch.ones(3, 4)).sum())


def test_all_ranks_of_a_large_world_have_one_graph() -> None:
    first, last = _graphs(1024, 0), _graphs(1024, 1023)
    assert first == last
    assert events(first[1]) == ["gather[4096]", "gather[12288]", "mm[3, 12]", "mm[3, 2]"]
    assert "reduce[4]" in events(first[3]) and "reduce[12]" in events(first[3])
