"""Graphs of worlds that are larger than any test machine, traced in one process on the fake process group."""

from __future__ import annotations

import torch
from torch import nn

import compile_fsdp
from helpers.graphs.caches import without_graph_caches
from helpers.graphs.capture import events, render_step
from helpers.ranks.fake_world import fake_world


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


def test_shards_of_one_row_leave_no_windows() -> None:
    compile_fsdp.reset_reports()
    with fake_world(64):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64))
        for module in (model[0], model[2], model):
            compile_fsdp.fully_shard(module)
        step = torch.compile(model, backend="compile_fsdp", fullgraph=True)
        with without_graph_caches():
            step(torch.ones(3, 32)).sum().backward()
    forward, backward = compile_fsdp.reports()
    assert (forward.windows_removed, forward.kept) == (4, ())
    assert (backward.windows_removed, backward.kept) == (4, ())
