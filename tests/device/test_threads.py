"""Thread and Inductor settings with which a backward graph is compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._dynamo import register_backend

import compile_fsdp
from helpers.parity.check import build, loss_of
from helpers.ranks.pools import run_ranks


def _graphs(rank: int) -> list[tuple[bool, bool]]:
    """Whether each graph, in order, was compiled on the caller's thread, and with the caller's settings."""
    here = threading.get_ident()
    graphs: list[tuple[bool, bool]] = []

    def watch(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append((threading.get_ident() == here, torch._inductor.config.max_autotune))
        return graph.forward

    register_backend(watch, name="watching")
    case = build("mlp", compile_fsdp.fully_shard)
    case.model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "watching"})
    with torch._inductor.config.patch(max_autotune=True):
        loss_of(case.model, case.batch()).backward()
    return graphs


@pytest.mark.parametrize(("device", "backward_is_here"), [("cpu", True), ("emulated", False)])
def test_backward_compiles_on_the_autograd_thread_with_the_callers_settings(
    device: str, backward_is_here: bool
) -> None:
    assert run_ranks(2, _graphs, device=device) == [[(True, True), (backward_is_here, True)]] * 2
