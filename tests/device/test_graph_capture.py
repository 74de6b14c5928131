"""The emulated device captures and replays graphs of launches as CUDA does."""

from __future__ import annotations

import pytest
import torch

from helpers.ranks.tests import on_ranks

DEVICE = "emulated"


def _random(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x @ x, 0.5, True) * 2


@on_ranks(1, DEVICE)
def test_replay_computes_with_new_values_and_new_random_numbers(rank: int) -> None:
    module, x = torch.get_device_module(DEVICE), torch.zeros(8, 8)
    _random(x)
    graph = module.CUDAGraph()
    with module.graph(graph):
        result = _random(x)
    for seed in range(3):
        x.copy_(torch.randn(8, 8))
        torch.manual_seed(seed)
        graph.replay()
        got = result.clone()
        torch.manual_seed(seed)
        assert torch.equal(got, _random(x))


@on_ranks(1, DEVICE)
def test_capture_refuses_to_wait_for_the_host(rank: int) -> None:
    module = torch.get_device_module(DEVICE)
    refusal = pytest.raises(RuntimeError, match="not permitted when stream is capturing")
    with refusal, module.graph(module.CUDAGraph()):
        torch.ones(8).sum().item()


@on_ranks(1, DEVICE)
def test_replay_that_reads_freed_memory_is_refused(rank: int) -> None:
    module, x = torch.get_device_module(DEVICE), torch.ones(8)
    graph = module.CUDAGraph()
    with module.graph(graph):
        _ = x + 1
    graph.replay()
    del x
    with pytest.raises(RuntimeError, match="uses memory that is freed"):
        graph.replay()
