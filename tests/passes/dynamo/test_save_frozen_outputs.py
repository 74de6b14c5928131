"""Ops on frozen parameters that the backward may not compute again."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from compile_fsdp.passes.dynamo.save_frozen_outputs import save_frozen_outputs
from compile_fsdp.torch_compat.dispatch import HigherOrderOperator
from helpers.graphs.build import Layer


def _saved(layer: Layer, *results: fx.Node, is_frozen: bool = True) -> list[fx.Node]:
    graph = layer.build.output(*results)
    save_frozen_outputs(graph, [layer.weight] if is_frozen else [])
    return [node for node in graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]


def test_result_of_a_frozen_parameter_is_saved_and_its_readers_are_not(layer: Layer) -> None:
    (product,) = layer.add("fill read free")
    assert _saved(layer, layer.build.call(torch.tanh, product)) == [product]


def test_result_that_reads_a_view_is_saved_and_the_view_is_not(layer: Layer) -> None:
    view = layer.build.call_method("t", layer.weight)
    product = layer.build.call(torch.matmul, layer.x, view)
    assert _saved(layer, product) == [product]


def test_result_that_needs_a_gradient_may_be_recomputed(layer: Layer) -> None:
    layer.build.value(layer.x).requires_grad_()
    assert _saved(layer, layer.read()) == []


def test_op_may_be_recomputed_if_one_of_its_results_needs_a_gradient(layer: Layer) -> None:
    layer.build.value(layer.x).requires_grad_()
    moved = layer.build.call(torch.add, layer.x, layer.weight)
    both = layer.build.call(lambda *values: torch.stack(values).max(0), moved, layer.weight)  # values and indices
    assert _saved(layer, both) == []


def test_other_parameters_and_sizes_are_left_alone(layer: Layer) -> None:
    size = layer.build.call_method("size", layer.weight)
    other = layer.build.call(torch.matmul, layer.x, layer.value)
    assert _saved(layer, other, size) == []


def test_checkpoint_of_the_user_may_be_recomputed(layer: Layer) -> None:

    class Checkpoint(HigherOrderOperator):  # type: ignore[misc, valid-type]
        def __call__(self, *args: torch.Tensor) -> torch.Tensor:
            return torch.matmul(*args)

    result = layer.build.call(Checkpoint("checkpoint"), layer.x, layer.weight)
    assert _saved(layer, result) == []


def test_without_frozen_parameters_nothing_is_saved(layer: Layer) -> None:
    assert _saved(layer, layer.read(), is_frozen=False) == []
