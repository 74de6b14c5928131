"""Python's garbage collector is paused during compilation, then restored."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import compile_fsdp
from helpers.ranks.fake_world import fake_world

collections: list[int] = []


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    gc.callbacks.append(count)
    yield
    gc.callbacks.remove(count)
    gc.enable()


class _Breaks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def _compiled(layer: nn.Module) -> nn.Module:
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 4))
    compile_fsdp.fully_shard(model)
    model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
    return model


def test_garbage_collector_is_paused_while_a_forward_is_traced() -> None:
    with fake_world(2):
        model = _compiled(nn.Linear(4, 4))
        gc.collect()
        collections.clear()
        loss = model(torch.ones(2, 4)).sum()
        assert len(collections) <= 1  # one may follow the trace; without the pause, about 300 run
        assert gc.isenabled()
        loss.backward()
        assert gc.isenabled()


def test_garbage_collector_is_enabled_after_a_failed_trace() -> None:
    with fake_world(2):
        model = _compiled(_Breaks(4, 4))
        with pytest.raises(torch._dynamo.exc.Unsupported):
            model(torch.ones(2, 4))
        assert gc.isenabled()


def test_disabled_garbage_collector_stays_disabled() -> None:
    with fake_world(2):
        model = _compiled(nn.Linear(4, 4))
        gc.disable()
        model(torch.ones(2, 4)).sum().backward()
        assert not gc.isenabled()
