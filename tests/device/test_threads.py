"""On a device, autograd runs backwards on a thread of its own: the compiled backward runs there, too."""

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
    """By graph, in the order of compilation: whether it was compiled on the caller's thread, and with its settings."""
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
def test_the_backward_is_compiled_on_the_thread_of_the_device_with_the_settings_of_the_caller(
    device: str, backward_is_here: bool
) -> None:
    assert run_ranks(2, _graphs, device=device) == [[(True, True), (backward_is_here, True)]] * 2
