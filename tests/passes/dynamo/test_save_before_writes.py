"""Ops on inputs that are written later, which the backward may not compute again."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from compile_fsdp.passes.dynamo.save_before_writes import save_before_writes
from compile_fsdp.torch_compat.dispatch import HigherOrderOperator
from helpers.graphs.build import Layer


def _saved(layer: Layer, *results: fx.Node) -> list[fx.Node]:
    graph = layer.build.output(*results)
    save_before_writes(graph)
    return [node for node in graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]


def test_result_of_an_input_that_is_written_later_is_saved(layer: Layer) -> None:
    view = layer.build.call_method("t", layer.x)
    moved = layer.build.call(torch.sub, layer.value, view)
    result = layer.build.call(torch.sin, moved)
    layer.write(layer.x)
    assert _saved(layer, result) == [moved]


def test_result_of_the_written_input_may_be_recomputed(layer: Layer) -> None:
    layer.write(layer.x)
    assert _saved(layer, layer.build.call(torch.sub, layer.value, layer.x)) == []


def test_result_of_a_value_that_is_written_later_may_be_recomputed(layer: Layer) -> None:
    value = layer.build.call(torch.sin, layer.x)  # AOTAutograd makes a new value of the written one
    result = layer.build.call(torch.sub, layer.value, value)
    layer.write(value)
    assert _saved(layer, result) == []


def test_fills_of_parameters_are_no_writes(layer: Layer) -> None:
    assert _saved(layer, *layer.add("fill read free fill read free")) == []


def test_checkpoint_may_be_recomputed(layer: Layer) -> None:
    class Checkpoint(HigherOrderOperator):  # type: ignore[misc, valid-type]
        def __call__(self, *args: torch.Tensor) -> torch.Tensor:
            return torch.matmul(*args)

    result = layer.build.call(Checkpoint("checkpoint"), layer.value, layer.x)
    layer.write(layer.x)
    assert _saved(layer, result) == []
